# SPDX-License-Identifier: Apache-2.0
"""The phases of an offload as both engines recorded them.

The proxy cannot see into an engine. Where the instances wrote engine_request.jsonl
(patch request_timing) and engine_step.jsonl, P's queue is told from its prefill, and
the transfer from D's start. Both files must be by one clock: of one machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import polars as pl

from fleet.analyze.records import ArmRun
from lab.records import RecordsError
from lab.records.engine_requests import (
    EngineRequest,
    ids_of_completion,
    read_engine_requests,
)
from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader

PHASES = ("p_queue", "p_prefill", "transfer", "d_start", "first_token")
FILES = "engine_request.jsonl", "engine_step.jsonl"


class _Engine(NamedTuple):
    """What an instance recorded: requests by id, the first and last moment of steps."""

    boot_id: str | None
    hashed: bool
    requests: dict[str, list[EngineRequest]]
    steps: dict[int, list[int]]

    def named(self, request_id: str) -> list[EngineRequest]:
        """The completions that go by this `X-Request-Id` here."""
        return self.requests.get(ids_of_completion(request_id)[self.hashed], [])


def engine_phases(run: ArmRun) -> list[dict[str, Any]]:
    """{repeat, id, <phase>: ms} of the offloads whose KV was used, as far as recorded.

    Raises RecordsError.
    """
    engines: dict[str, _Engine | None] = {}

    def engine(name: str) -> _Engine | None:
        if name not in engines:
            engines[name] = _read(run.folder / "instances" / name)
        return engines[name]

    rows = []
    for end in run.decision_ends:
        if end.offload is None or end.offload.failure is not None:
            continue
        p, d = engine(end.offload.prefill_instance), engine(end.instance)
        if p is None or d is None or p.boot_id != d.boot_id:
            continue
        if (phases := _phases(p, d, end.id)) is not None:
            rows.append({"repeat": run.info.repeat, "id": unquote(end.id)} | phases)
    return rows


def _phases(p: _Engine, d: _Engine, request_id: str) -> dict[str, float] | None:
    """In ms; None if one of the two did not record a prefill or a pull of this name."""
    sent = [one for one in p.named(request_id) if one.first_token_step in p.steps]
    pulled = [
        one
        for one in d.named(request_id)
        if one.first_token_step in d.steps and len(one.kv_wait_ns) == 2
    ]
    if not (sent and pulled):
        return None
    prefill, decode = sent[-1], pulled[-1]
    scheduled_ns, _ = p.steps[prefill.first_step]
    _, prefilled_ns = p.steps[prefill.first_token_step]
    waits_ns, arrived_ns = decode.kv_wait_ns
    resumed_ns, _ = d.steps[decode.first_step]
    _, token_ns = d.steps[decode.first_token_step]
    moments = (
        (prefill.arrival_ns, scheduled_ns),
        (scheduled_ns, prefilled_ns),
        # Over Mooncake D waits from the beginning.
        (max(waits_ns, prefilled_ns), arrived_ns),
        (arrived_ns, resumed_ns),
        (resumed_ns, token_ns),
    )
    return {
        phase: max(0.0, (end_ns - start_ns) / 1e6)
        for phase, (start_ns, end_ns) in zip(PHASES, moments, strict=True)
    }


def _read(folder: Path) -> _Engine | None:
    """None if the instance recorded no requests or no steps."""
    requests, steps = (folder / name for name in FILES)
    if not (requests.is_file() and steps.is_file()):
        return None
    lines = read_engine_requests(requests)
    if lines.header is None:
        raise RecordsError(f"{requests}:1: no header line")
    by_id: dict[str, list[EngineRequest]] = {}
    for one in lines.records:
        by_id.setdefault(one.id, []).append(one)
    frame = read_steps(steps, EngineHeader, ("step_id", "t_ns", "step_us")).frame
    took_ns = (1e3 * pl.col("step_us")).cast(pl.Int64)
    spanned = frame.select("step_id", "t_ns", end_ns=pl.col("t_ns") + took_ns)
    spans = {step: span for step, *span in spanned.drop_nulls().iter_rows()}
    return _Engine(lines.header.boot_id, lines.header.ids == "hashed", by_id, spans)
