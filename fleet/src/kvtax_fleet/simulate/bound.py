# SPDX-License-Identifier: Apache-2.0
"""Lower bound of latency for any policy: `kvtax fleet bound`.

Each request is alone, with caches that lose nothing. An oracle that knew all caches and
the length of every answer would still have to compute new tokens, and to decode, on the
device that the profile describes. So everything that an earlier turn or any other
session of the trace has counts as cached, and no request waits for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec
import polars as pl
from kvtax.engine.null_model import Forward
from kvtax.engine.vllm_plugin.kvtax_null_model.forward import SimulatedForward
from kvtax.records import RecordsError
from kvtax.report.markdown import DASH, table
from kvtax.stats.quantiles import tpot_of

from kvtax_fleet.analyze.arm_runs import ArmRun, read_run
from kvtax_fleet.analyze.frames import TITLES, requests_frame
from kvtax_fleet.trace import Request, read_trace


class Latency(NamedTuple):
    """Latencies of a request; `tpot_ms` is None for an answer of one token."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float


def bounds(
    requests: Sequence[Request], forward: Forward, chunk_tokens: int
) -> dict[str, Latency]:
    """Return bounds by request id, for prefills of `chunk_tokens` at a time."""
    device = SimulatedForward(**msgspec.structs.asdict(forward))
    found = {}
    for request, cached in zip(requests, _cached_tokens(requests), strict=True):
        prompt = request.input_tokens
        ttft_us = 0.0
        for begin in range(cached, prompt, chunk_tokens):
            tokens = min(chunk_tokens, prompt - begin)
            attended = tokens * begin + tokens * (tokens - 1) // 2
            ttft_us += device.duration_us(tokens, attended, begin)
        tokens = max(1, request.output_tokens)
        steps = tokens - 1
        # Each token attends to all before it: on average to those of the middle one.
        middle = prompt + (steps - 1) / 2
        end_us = ttft_us + steps * device.duration_us(1, middle, middle)
        found[f"{request.session}/{request.turn}"] = Latency(
            ttft_us / 1e3, tpot_of(ttft_us / 1e3, end_us / 1e3, tokens), end_us / 1e3
        )
    return found


def _cached_tokens(requests: Sequence[Request]) -> list[int]:
    """Return the most tokens of each prompt that an earlier request has."""
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
        # The next block may be shared in part, which its id does not show.
        found.append(min(one.input_tokens - 1, (shared + 1) * one.block_tokens))
    return found


def measured(run: ArmRun) -> dict[str, Latency]:
    """Return the latencies of a run's requests that ended ok."""
    ok = requests_frame([run]).filter(pl.col("status") == "ok")
    return {id_: Latency(*ms) for id_, *ms in ok.select("id", *TITLES).iter_rows()}


def above(run_dir: Path) -> str:
    """Return a Markdown table of a run's arms. Raises RecordsError and TraceError."""
    rows: dict[str, list[str]] = {}
    # Of several repeats of an arm, the last one stays.
    runs = {run.info.arm: run for run in read_run(run_dir) if run.info.status == "ok"}
    requests = list(read_trace(run_dir / "trace.jsonl.gz"))
    for arm, run in runs.items():
        least = _least(run, requests)
        rows.setdefault("no policy can be below", _means(least, least))
        rows[f"`{arm}`"] = _means(measured(run), least)
    head = ["mean of the last repeat, ms", *TITLES.values()]
    return table(head, [[name, *cells] for name, cells in rows.items()])


def _least(run: ArmRun, requests: Sequence[Request]) -> dict[str, Latency]:
    profile = run.info.profile
    if profile is None or profile["forward"] is None:
        raise RecordsError(f"{run.folder}: its profile simulates no forward")
    forward = msgspec.convert(profile["forward"], Forward)
    return bounds(requests, forward, profile["max_num_batched_tokens"])


def _means(found: dict[str, Latency], least: dict[str, Latency]) -> list[str]:
    """Return each mean, and its ratio to the bound's, over the same requests."""
    cells = []
    for field in range(len(Latency._fields)):
        pairs = [
            (one[field], least[name][field])
            for name, one in found.items()
            if one[field] is not None
        ]
        if not pairs:  # as of answers of one token
            cells.append(DASH)
            continue
        ours, theirs = (mean(column) for column in zip(*pairs, strict=True))
        cells.append(f"{ours:,.1f} ({ours / theirs:.2f})")
    return cells
