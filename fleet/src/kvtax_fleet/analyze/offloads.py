# SPDX-License-Identifier: Apache-2.0
"""Prefills on another instance: how often, how long each phase took, why they failed.

The proxy notes the moments (kvtax_fleet/records/decisions.py, Offload): the request to
P, P's answer, D's first token. So `prefill` holds P's queue, and `handover` the
transfer and D's start. Where the instances wrote engine_request.jsonl and
engine_step.jsonl, P's queue and prefill are separate phases, and so are the transfer
and D's start. Both files must be by one clock: of one machine.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import polars as pl
from kvtax.records.requests import (
    EngineRequest,
    ids_of_completion,
    read_engine_requests,
)
from kvtax.records.steps import EngineHeader, only_life
from kvtax.stats.quantiles import SessionDraws
from kvtax.steps.step_file import read_steps

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.frames import Levels, estimates

NOT_OFFLOADED = ": not offloaded"
PHASES = ("before_prefill", "prefill", "handover", "total")
KEY = {"repeat": pl.Int64, "id": pl.String}


class Offloads(msgspec.Struct):
    """Prefills on another instance, in all repeats of one arm."""

    requests: int
    """Requests with a decision."""
    begun: int
    """Offloads that were begun."""
    used: int
    """Offloads whose KV was used."""
    failures: dict[str, int]
    """Offloads whose KV was not used, by reason."""
    kept: dict[str, int]
    """Heavy prefills that the policy left in place, by reason."""
    phases_ms: dict[str, Levels]
    """Phases of the offloads whose KV was used."""
    engine_phases_ms: dict[str, Levels]
    """The same, as both engines recorded them."""


def offloads(
    runs: list[ArmRun], requests: pl.DataFrame, draws: SessionDraws
) -> Offloads | None:
    """Describe the offloads; None if no prefill was to be done elsewhere.

    `requests` is a requests_frame. Raises RecordsError.
    """
    asked, begun, rows = 0, 0, []
    failures: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for run in runs:
        names = "|".join(re.escape(record.name) for record in run.info.instances)
        decided = {line.number: line for line in run.decisions}
        asked += len(decided)
        for line in decided.values():
            if line.reason.endswith(NOT_OFFLOADED):
                why = line.reason.removesuffix(NOT_OFFLOADED)
                kept[re.sub(rf"\b({names})\b", "an instance", why)] += 1
        for end in run.decision_ends:
            if end.offload is None:
                continue
            begun += 1
            if end.offload.failure is not None:
                failures[end.offload.failure] += 1
                continue
            ms = {name: 1e3 * s for name, s in end.offload.phases_s().items()}
            rows.append({"repeat": run.info.repeat, "id": unquote(end.id)} | ms)
    if not (begun or kept):
        return None
    engine_rows = [row for run in runs for row in engine_phases(run)]
    return Offloads(
        requests=asked,
        begun=begun,
        used=len(rows),
        failures=dict(failures.most_common()),
        kept=dict(kept.most_common()),
        phases_ms=_levels(rows, PHASES, requests, draws),
        engine_phases_ms=_levels(engine_rows, ENGINE_PHASES, requests, draws),
    )


def _levels(
    rows: list[dict[str, Any]],
    phases: tuple[str, ...],
    requests: pl.DataFrame,
    draws: SessionDraws,
) -> dict[str, Levels]:
    frame = pl.DataFrame(rows, schema=KEY | dict.fromkeys(phases, pl.Float64))
    own = frame.join(requests, on=list(KEY))
    return {
        phase: estimates(draws.quantiles(own[phase], own["session"]), 4)
        for phase in phases
    }


ENGINE_PHASES = ("p_queue", "p_prefill", "transfer", "d_start", "first_token")
FILES = "engine_request.jsonl", "engine_step.jsonl"


class _Engine(NamedTuple):
    """Records of an instance: requests by id, first and last moment of its steps."""

    boot_id: str | None
    hashed: bool
    requests: dict[str, list[EngineRequest]]
    steps: dict[int, list[int]]

    def named(self, request_id: str) -> list[EngineRequest]:
        """Find the completions with this `X-Request-Id`."""
        return self.requests.get(ids_of_completion(request_id)[self.hashed], [])

    def spans(self, request: EngineRequest) -> tuple[list[int], list[int]] | None:
        """Return the times of a request's first step and of its first token's step."""
        if request.first_step is None or request.first_token_step not in self.steps:
            return None
        return self.steps[request.first_step], self.steps[request.first_token_step]


def engine_phases(run: ArmRun) -> list[dict[str, Any]]:
    """{repeat, id, <phase>: ms} of the offloads whose KV was used, as far as recorded.

    Raises RecordsError.
    """
    engines: dict[str, _Engine | None] = {}

    def engine(name: str | None) -> _Engine | None:
        if name is None:
            return None
        if name not in engines:
            engines[name] = _read_engine(run.folder / "instances" / name)
        return engines[name]

    rows = []
    for end in run.decision_ends:
        if end.offload is None or end.offload.failure is not None:
            continue
        p, d = engine(end.offload.prefill_instance), engine(end.instance)
        if p is None or d is None or p.boot_id != d.boot_id:
            continue
        if (phases := _engine_phases(p, d, end.id)) is not None:
            rows.append({"repeat": run.info.repeat, "id": unquote(end.id)} | phases)
    return rows


def _engine_phases(p: _Engine, d: _Engine, request_id: str) -> dict[str, float] | None:
    """Compute the phases in ms.

    None if one of the two did not record a prefill or a pull of this name.
    """
    sent = [r for r in p.named(request_id) if p.spans(r) is not None]
    pulled = [
        r
        for r in d.named(request_id)
        if d.spans(r) is not None and len(r.kv_wait_ns) == 2
    ]
    prefill_spans = p.spans(sent[-1]) if sent else None
    decode_spans = d.spans(pulled[-1]) if pulled else None
    if prefill_spans is None or decode_spans is None:
        return None
    prefill, decode = sent[-1], pulled[-1]
    (scheduled_ns, _), (_, prefilled_ns) = prefill_spans
    waits_ns, arrived_ns = decode.kv_wait_ns
    (resumed_ns, _), (_, token_ns) = decode_spans
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
        for phase, (start_ns, end_ns) in zip(ENGINE_PHASES, moments, strict=True)
    }


def _read_engine(folder: Path) -> _Engine | None:
    requests, steps = (only_life(folder) / name for name in FILES)
    if not (requests.is_file() and steps.is_file()):
        return None
    lines = read_engine_requests(requests)
    by_id: dict[str, list[EngineRequest]] = {}
    for record in lines.records:
        by_id.setdefault(record.id, []).append(record)
    frame = read_steps(steps, EngineHeader, ("step_id", "t_ns", "step_us")).frame
    took_ns = (1e3 * pl.col("step_us")).cast(pl.Int64)
    spanned = frame.select("step_id", "t_ns", end_ns=pl.col("t_ns") + took_ns)
    spans = {step: span for step, *span in spanned.drop_nulls().iter_rows()}
    return _Engine(lines.header.boot_id, lines.header.ids == "hashed", by_id, spans)
