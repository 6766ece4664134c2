# SPDX-License-Identifier: Apache-2.0
"""What no policy can be faster than: each request alone, with caches that lose nothing.

    python -m fleet.virtual.bound RUN_DIR

An oracle that knew all caches and the length of every answer would still have to
compute what nobody has computed before, and to decode, on the device that the profile
describes. So all that an earlier turn or any other session of the trace has is taken as
cached, and nobody waits for anybody. Prints how far the means of a run's arms are above
that. Exit status 0; 2 with a message if the run cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from fleet.trace import Request, TraceError, read_trace
from lab.records import RecordsError
from lab.records.arm import ArmRecord
from lab.records.documents import read_document
from lab.records.lines import read_lines
from lab.records.replay import ReplayedRequest, ReplayEnd, ReplayHeader
from lab.serving.settings import Forward
from lab.serving.vllm_plugin.kvtax_null_model.forward import SimulatedForward
from lab.stats.markdown import table


class Latency(NamedTuple):
    """`tpot_ms` is None where there is one token only."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float


def bounds(
    requests: Sequence[Request], forward: Forward, chunk_tokens: int
) -> dict[str, Latency]:
    """By request id, on a device that computes up to `chunk_tokens` at a time."""
    device = SimulatedForward(**msgspec.structs.asdict(forward))
    found = {}
    for request, cached in zip(requests, _cached_tokens(requests), strict=True):
        prompt = request.input_tokens
        ttft_us = 0.0
        for begin in range(cached, prompt, chunk_tokens):
            tokens = min(chunk_tokens, prompt - begin)
            attended = tokens * begin + tokens * (tokens - 1) // 2
            ttft_us += device.duration_us(tokens, attended)
        steps = max(1, request.output_tokens) - 1
        # Each token attends to all before it: on average to those of the middle one.
        tpot_us = device.duration_us(1, prompt + (steps - 1) / 2)
        found[f"{request.session}/{request.turn}"] = Latency(
            ttft_us / 1e3,
            tpot_us / 1e3 if steps else None,
            (ttft_us + steps * tpot_us) / 1e3,
        )
    return found


def _cached_tokens(requests: Sequence[Request]) -> list[int]:
    """Of each prompt, what an earlier turn or another session has, at most."""
    sessions: dict[int, set[str]] = defaultdict(set)
    for one in requests:
        for block in one.hashes:
            sessions[block].add(one.session)
    earlier: dict[str, set[int]] = defaultdict(set)
    found = []
    for one in requests:
        own = earlier[one.session]
        shared = next(
            (
                place
                for place, block in enumerate(one.hashes)
                if block not in own and sessions[block] == {one.session}
            ),
            len(one.hashes),
        )
        own.update(one.hashes)
        # The next block may be shared in part, which its id does not tell.
        found.append(min(one.input_tokens - 1, (shared + 1) * one.block_tokens))
    return found


def measured(folder: Path) -> dict[str, Latency]:
    """The latencies of a run's requests that ended ok. Raises RecordsError."""
    lines = read_lines(
        folder / "replay.jsonl", ReplayHeader, ReplayedRequest | ReplayEnd
    )
    found = {}
    for one in lines.records:
        if not isinstance(one, ReplayedRequest) or one.status != "ok":
            continue
        ttft_ms = (one.first_token_ns - one.intended_ns) / 1e6
        e2e_ms = (one.end_ns - one.intended_ns) / 1e6
        steps = one.usage_completion_tokens - 1
        tpot_ms = (e2e_ms - ttft_ms) / steps if steps else None
        found[one.id] = Latency(ttft_ms, tpot_ms, e2e_ms)
    return found


def above(run_dir: Path) -> str:
    """Markdown. Raises RecordsError and TraceError."""
    folders = sorted(path.parent for path in run_dir.glob("*/r*/arm.json"))
    if not folders:
        raise RecordsError(f"{run_dir}: no arm.json in it")
    rows: dict[str, list[str]] = {}
    requests = list(read_trace(run_dir / "trace.jsonl.gz"))
    for folder in folders:
        info = read_document(folder / "arm.json", ArmRecord)
        if info.status == "ok" and info.arm not in rows:
            least = _least(folder, info, requests)
            rows.setdefault("no policy can be below", _means(least, least))
            rows[f"`{info.arm}`"] = _means(measured(folder), least)
    return table(
        ["mean of the first repeat, ms", "TTFT", "TPOT", "E2E"],
        [[name, *cells] for name, cells in rows.items()],
    )


def _least(
    folder: Path, info: ArmRecord, requests: Sequence[Request]
) -> dict[str, Latency]:
    if info.profile is None or info.profile["forward"] is None:
        raise RecordsError(f"{folder}: its profile simulates no forward")
    forward = msgspec.convert(info.profile["forward"], Forward)
    return bounds(requests, forward, info.profile["max_num_batched_tokens"])


def _means(found: dict[str, Latency], least: dict[str, Latency]) -> list[str]:
    """Each mean, and how many times the bound's it is, over the same requests."""
    cells = []
    for field in range(len(Latency._fields)):
        pairs = [
            (one[field], least[name][field])
            for name, one in found.items()
            if one[field] is not None
        ]
        ours, theirs = (mean(column) for column in zip(*pairs, strict=True))
        cells.append(f"{ours:,.1f} ({ours / theirs:.2f})")
    return cells


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.virtual.bound", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("run_dir", type=Path)
    options = parser.parse_args(argv)
    try:
        print(above(options.run_dir))
    except (RecordsError, TraceError) as error:
        print(f"fleet.virtual.bound: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
