# SPDX-License-Identifier: Apache-2.0
"""Files in which clients recorded their requests: when each was sent and answered.

Our driver and replayer, and the result of `vllm bench serve --save-detailed`. Files of
other programs are recognised by several of their fields, and named: a format that its
program does not document would be guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import jsonlines
import msgspec

from kvtax.records import RecordsError
from kvtax.records.files import read_lines
from kvtax.records.requests import (
    ReplayedRequest,
    ReplayEnd,
    ReplayHeader,
    RequestOutcome,
    in_header,
    read_requests,
)

DRIVER, REPLAYER = "requests.jsonl", "replay.jsonl"
# Names of files that may be a client's.
KINDS = ("*.json", "*.jsonl")
# Prompts or answers of a request that are looked for.
MOST_ANSWERS = 8


class ClientRequest(NamedTuple):
    """One request of a client: its name for it, and the server's ids that it may have.

    `prompt_tokens` and `output_tokens` are what the server counted; None where only the
    client did. `e2e_us` is None without a whole answer, `ttft_us` without a stream.
    """

    name: str
    ids: tuple[str, ...]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_us: float | None = None
    e2e_us: float | None = None


class ClientFile(NamedTuple):
    """Requests of a file, and how many have no id by which a server knows them."""

    requests: list[ClientRequest]
    torn_lines: int = 0
    without_id: int = 0


class Program(NamedTuple):
    """A program that writes results: fields of its files, and why they are not read."""

    name: str
    fields: tuple[bytes, ...]
    why: str


DETAILED = (b'"num_prompts"', b'"output_lens"', b'"ttfts"')
NO_ID = "its requests have no id that the server records"
# The first that has all its fields counts.
OTHERS = (
    Program(
        "aiperf",
        (b'"x_request_id"', b'"request_start_ns"', b'"metrics"'),
        "its format is not documented",
    ),
    Program("guidellm", (b'"benchmarks"', b"guidellm"), "its format is not documented"),
    Program(
        "sglang.bench_serving",
        (b'"dataset_name"', b'"request_rate"', b'"completed"', b'"ttfts"'),
        NO_ID,
    ),
    Program(
        "vllm bench serve without --save-detailed, or of sglang.bench_serving without "
        "--output-details",
        (b'"request_rate"', b'"completed"'),
        "it has no times of single requests",
    ),
)


def is_client_file(path: Path) -> bool:
    """Decide whether the file is one that a client wrote."""
    return _reader_of(path) is not None


def read_client_file(path: Path) -> ClientFile:
    """Read a client's file. Raises RecordsError."""
    read = _reader_of(path)
    if read is None:
        raise RecordsError(f"{path}: not a client's file")
    try:
        return read(path)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordsError(f"{path}: {error}") from None
    except jsonlines.InvalidLineError as error:
        why = error.__cause__ or error
        raise RecordsError(f"{path}:{error.lineno}: {why}") from None
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None


def _reader_of(path: Path) -> Callable[[Path], ClientFile] | None:
    if path.name == DRIVER:
        return _driven
    if path.name == REPLAYER:
        return _replayed
    if not path.suffix.startswith(".json"):
        return None
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, prot=PROT_READ) as content:
            # A list of thousands of requests may stand before the field that shows it.
            one_line = path.suffix == ".jsonl" and content.find(b"\n") + 1
            end = one_line or len(content)

            def has(fields: tuple[bytes, ...]) -> bool:
                return all(content.find(field, 0, end) >= 0 for field in fields)

            if has(DETAILED):
                return _vllm_bench
            return next((_refuses(p) for p in OTHERS if has(p.fields)), None)
    except (OSError, ValueError):  # no file, or an empty one
        return None


def _refuses(program: Program) -> Callable[[Path], ClientFile]:
    def refuse(path: Path) -> ClientFile:
        raise RecordsError(
            f"{path}: of {program.name}: not read, because {program.why}; "
            "vllm bench serve --save-detailed is read"
        )

    return refuse


def _driven(path: Path) -> ClientFile:
    driven = read_requests(path)
    requests = [
        _own(str(request.id), request.prompt_tokens, request.output_tokens, request)
        for request in driven.requests
    ]
    return ClientFile(requests, driven.torn_lines)


def _replayed(path: Path) -> ClientFile:
    lines = read_lines(path, ReplayHeader, ReplayedRequest | ReplayEnd)
    requests = [
        _own(
            in_header(record.id),
            record.usage_prompt_tokens,
            record.usage_completion_tokens,
            record,
        )
        for record in lines.records
        if isinstance(record, ReplayedRequest)
    ]
    return ClientFile(requests, lines.torn_lines)


def _own(
    name: str,
    prompt_tokens: int | None,
    output_tokens: int | None,
    outcome: RequestOutcome,
) -> ClientRequest:
    ids = (_completion(name),)
    sent_ns, first_ns, end_ns = outcome.sent_ns, outcome.first_token_ns, outcome.end_ns
    if outcome.status != "ok" or sent_ns is None or first_ns is None or end_ns is None:
        return ClientRequest(name, ids)
    ttft_us, e2e_us = (first_ns - sent_ns) / 1e3, (end_ns - sent_ns) / 1e3
    return ClientRequest(name, ids, prompt_tokens, output_tokens, ttft_us, e2e_us)


def _completion(x_request_id: str) -> str:
    return f"cmpl-{x_request_id}-0"


def _ids(x_request_id: str) -> tuple[str, ...]:
    """Name what vLLM makes of a header: of a completion, or a chat's answer."""
    return _answers(f"cmpl-{x_request_id}") + _answers(f"chatcmpl-{x_request_id}")


def _answers(response_id: str) -> tuple[str, ...]:
    """Name the engine's requests of an answer: each prompt and answer has a number."""
    prompts = [f"{response_id}-{number}" for number in range(MOST_ANSWERS)]
    several = [
        f"{number}_{name}"
        for number in range(MOST_ANSWERS)
        for name in (response_id, f"{response_id}-0")
    ]
    return (response_id, *prompts, *several)


class _VllmBench(msgspec.Struct):
    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    errors: list[str]
    latencies: list[float] | None = None
    request_ids: list[str | None] | None = None
    request_id_prefix: str | None = None

    def __post_init__(self) -> None:
        """Refuse columns of different lengths; msgspec makes a DecodeError of it."""
        columns: list[list[Any]] = [self.errors, self.ttfts]
        columns.append(self.latencies or self.itls)
        if self.request_ids is not None:
            columns.append(self.request_ids)
        if len(set(map(len, columns))) > 1:
            raise ValueError("lists of different lengths")


def _vllm_bench(path: Path) -> ClientFile:
    """Read results, one per line where they were appended.

    vLLM numbers its requests behind `--request-id-prefix`, and writes neither down:
    `--metadata request_id_prefix=PREFIX` does.
    """
    requests, without_id = [], 0
    decode = msgspec.json.Decoder(_VllmBench).decode
    content = path.read_bytes()
    results: Any
    try:
        results = [decode(content)]
    except msgspec.DecodeError:
        lines: Any = jsonlines.Reader(content.splitlines(), loads=decode)
        results = lines.iter(skip_empty=True)
    for bench in results:
        names = bench.request_ids
        if names is None and bench.request_id_prefix is not None:
            count = len(bench.errors)
            names = [f"{bench.request_id_prefix}{number}" for number in range(count)]
        e2e_s = bench.latencies or [
            ttft + sum(itl) for ttft, itl in zip(bench.ttfts, bench.itls, strict=True)
        ]
        for number, error in enumerate(bench.errors):
            name = names[number] if names else None
            if name is None:
                without_id += 1
            elif error:
                requests.append(ClientRequest(name, _ids(name)))
            else:
                us = (1e6 * bench.ttfts[number], 1e6 * e2e_s[number])
                requests.append(ClientRequest(name, _ids(name), None, None, *us))
    return ClientFile(requests, without_id=without_id)
