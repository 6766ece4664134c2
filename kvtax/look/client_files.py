# SPDX-License-Identifier: Apache-2.0
"""Files in which clients recorded their requests: what each sent, and how long it took.

Our driver and replayer, `profile_export.jsonl` of aiperf, the report of guidellm, and
the result of `vllm bench serve --save-detailed`. Names of files vary, so those of other
programs are recognised by several of their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from kvtax.records.steps import MOST

DRIVER, REPLAYER = "requests.jsonl", "replay.jsonl"
# Names of files that may be a client's.
KINDS = ("*.json", "*.jsonl")
# Answers to one request, or turns of one, that are looked for.
MOST_ANSWERS = 8
US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "sec": 1e6}


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
    """Requests of a file; bad lines, and how many have no id, with what to do then."""

    requests: list[ClientRequest]
    torn_lines: int = 0
    bad_lines: tuple[str, ...] = ()
    without_id: int = 0
    remedy: str = ""


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
            readers = (
                reader
                for fields, reader in EVIDENCE
                if all(content.find(field, 0, end) >= 0 for field in fields)
            )
            return next(readers, None)
    except (OSError, ValueError):  # no file, or an empty one
        return None


def _driven(path: Path) -> ClientFile:
    driven = read_requests(path)
    requests = [
        _own(str(one.id), one.prompt_tokens, one.output_tokens, one)
        for one in driven.requests
    ]
    return ClientFile(requests, driven.torn_lines)


def _replayed(path: Path) -> ClientFile:
    lines = read_lines(path, ReplayHeader, ReplayedRequest | ReplayEnd)
    requests = [
        _own(
            in_header(one.id),
            one.usage_prompt_tokens,
            one.usage_completion_tokens,
            one,
        )
        for one in lines.records
        if isinstance(one, ReplayedRequest)
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
    """Name the engine's requests of an answer.

    Each prompt of a completion has a number, each turn of /v1/responses has one, and so
    has each of several answers.
    """
    prompts = [f"{response_id}-{number}" for number in range(MOST_ANSWERS)]
    turns = [f"{response_id}_{number}" for number in range(MOST_ANSWERS)]
    several = [
        f"{number}_{one}"
        for number in range(MOST_ANSWERS)
        for one in (response_id, f"{response_id}-0")
    ]
    return (response_id, *prompts, *turns, *several)


AIPERF_TIMES = {"time_to_first_token", "request_latency"}


class _Metric(msgspec.Struct):
    value: float | list[float] | None = None
    unit: str = ""

    def times(self, scale: float | None) -> float | None:
        if isinstance(self.value, list) or self.value is None or scale is None:
            return None
        return self.value * scale

    @property
    def us(self) -> float | None:
        return self.times(US.get(self.unit))

    @property
    def tokens(self) -> int | None:
        count = self.times(1)
        return round(count) if count is not None and 0 <= count <= MOST else None


class _AiperfMetadata(msgspec.Struct):
    x_request_id: str
    was_cancelled: bool = False


class _AiperfRecord(msgspec.Struct):
    metadata: _AiperfMetadata
    metrics: dict[str, _Metric]
    error: Any = None

    def __post_init__(self) -> None:
        """Refuse times of unknown units; msgspec makes a DecodeError of it."""
        for name in AIPERF_TIMES & self.metrics.keys():
            metric = self.metrics[name]
            if metric.value is not None and metric.unit not in US:
                raise ValueError(f"{name} has the unknown unit {metric.unit!r}")


def _aiperf(path: Path) -> ClientFile:
    requests, bad = [], []
    decode = msgspec.json.Decoder(_AiperfRecord).decode
    with path.open("rb") as file:
        lines = jsonlines.Reader(file, loads=decode)
        while True:
            try:
                record: Any = lines.read(skip_empty=True)
            except EOFError:
                break
            except jsonlines.InvalidLineError as error:
                why = error.__cause__ or error
                bad.append(f"{path.name}:{error.lineno}: {why}")
            else:
                requests.append(_of_aiperf(record))
    return ClientFile(requests, bad_lines=tuple(bad))


def _of_aiperf(record: _AiperfRecord) -> ClientRequest:
    name = record.metadata.x_request_id
    nothing = _Metric()
    of = {
        key: record.metrics.get(key, nothing)
        for key in (
            *("usage_prompt_tokens", "usage_completion_tokens"),
            *("time_to_first_token", "request_latency"),
        )
    }
    failed = record.metadata.was_cancelled or record.error is not None
    if failed:
        return ClientRequest(name, _ids(name))
    return ClientRequest(
        name,
        _ids(name),
        of["usage_prompt_tokens"].tokens,
        of["usage_completion_tokens"].tokens,
        of["time_to_first_token"].us,
        of["request_latency"].us,
    )


class _GuidellmRequest(msgspec.Struct):
    request_id: str
    response_id: str | None = None
    request_latency: float | None = None
    time_to_first_token_ms: float | None = None


class _GuidellmRequests(msgspec.Struct):
    successful: list[_GuidellmRequest] = []
    incomplete: list[_GuidellmRequest] = []
    errored: list[_GuidellmRequest] = []


class _GuidellmBenchmark(msgspec.Struct):
    requests: _GuidellmRequests


class _GuidellmReport(msgspec.Struct):
    benchmarks: list[_GuidellmBenchmark]


def _guidellm(path: Path) -> ClientFile:
    report = msgspec.json.decode(path.read_bytes(), type=_GuidellmReport)
    requests, without_id = [], 0
    for one, answered in _of_guidellm(report):
        if not one.response_id:
            without_id += 1
            continue
        ids = _answers(one.response_id)
        ttft_ms, e2e_s = one.time_to_first_token_ms, one.request_latency
        requests.append(
            ClientRequest(
                one.response_id,
                ids,
                ttft_us=None if ttft_ms is None else 1e3 * ttft_ms,
                e2e_us=1e6 * e2e_s if answered and e2e_s is not None else None,
            )
        )
    remedy = "Use a backend of guidellm whose answers carry an id, as its OpenAI one"
    return ClientFile(requests, without_id=without_id, remedy=remedy)


def _of_guidellm(report: _GuidellmReport) -> Iterator[tuple[_GuidellmRequest, bool]]:
    for benchmark in report.benchmarks:
        for one in benchmark.requests.successful:
            yield one, True
        for one in (*benchmark.requests.incomplete, *benchmark.requests.errored):
            yield one, False


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
    remedy = (
        "Give vllm bench serve --request-id-prefix PREFIX and "
        "--metadata request_id_prefix=PREFIX"
    )
    return ClientFile(requests, without_id=without_id, remedy=remedy)


# Fields by which the files of other programs are recognised.
EVIDENCE = (
    ((b'"x_request_id"', b'"request_start_ns"', b'"metadata"', b'"metrics"'), _aiperf),
    ((b'"benchmarks"', b"guidellm"), _guidellm),
    ((b'"input_lens"', b'"output_lens"', b'"ttfts"'), _vllm_bench),
)
