# SPDX-License-Identifier: Apache-2.0
"""Prefills on another instance: how often, how long each phase took, why they failed.

The proxy notes the moments (lab/records/decisions.py, Offload): P is asked, P has
answered, D's first token is there. So `prefill` holds P's queue, and `handover` the
transfer and D's start. Engines that recorded their requests tell these apart.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from urllib.parse import unquote

import polars as pl

from fleet.analyze.engine_phases import PHASES as ENGINE_PHASES
from fleet.analyze.engine_phases import engine_phases
from fleet.analyze.records import ArmRun
from fleet.analyze.sessions import SessionDraws
from lab.stats.interval import stated

NOT_OFFLOADED = ": not offloaded"
PHASES = ("before_prefill", "prefill", "handover", "total")
KEY = {"repeat": pl.Int64, "id": pl.String}


def offloads(
    runs: list[ArmRun], requests: pl.DataFrame, draws: SessionDraws
) -> dict[str, Any] | None:
    """All repeats of one arm; None if no prefill was to be done elsewhere.

    `requests` is a requests_frame. {requests, begun, used, failures, kept, phases_ms,
    engine_phases_ms}: `failures`: why KV was not used, {kind: count}; `kept`: why the
    policy left a heavy prefill where it was, {reason: count}; the last two: {phase:
    quantiles} of the offloads whose KV was used. Raises RecordsError.
    """
    asked, begun, rows = 0, 0, []
    failures, kept = Counter(), Counter()
    for run in runs:
        names = "|".join(re.escape(one.name) for one in run.info.instances)
        decided = {line.number: line for line in run.decisions}
        asked += len(decided)
        for line in decided.values():
            if line.reason.endswith(NOT_OFFLOADED):
                why = line.reason.removesuffix(NOT_OFFLOADED)
                kept[re.sub(rf"\b({names})\b", "an instance", why)] += 1
        told = [end for end in run.decision_ends if end.offload is not None]
        begun += len(told)
        for end in told:
            if end.offload.failure is not None:
                failures[end.offload.failure] += 1
                continue
            ms = {name: 1e3 * s for name, s in end.offload.phases_s().items()}
            rows.append({"repeat": run.info.repeat, "id": unquote(end.id)} | ms)
    if not (begun or kept):
        return None
    engine_rows = [row for run in runs for row in engine_phases(run)]
    return {
        "requests": asked,
        "begun": begun,
        "used": len(rows),
        "failures": dict(failures.most_common()),
        "kept": dict(kept.most_common()),
        "phases_ms": _levels(rows, PHASES, requests, draws),
        "engine_phases_ms": _levels(engine_rows, ENGINE_PHASES, requests, draws),
    }


def _levels(
    rows: list[dict[str, Any]],
    phases: tuple[str, ...],
    requests: pl.DataFrame,
    draws: SessionDraws,
) -> dict[str, Any]:
    """{phase: {quantile: level}} of those that the replayer sent and that count."""
    frame = pl.DataFrame(rows, schema=KEY | dict.fromkeys(phases, pl.Float64))
    own = frame.join(requests, on=list(KEY))
    return {
        phase: {
            name: stated(level, 4)
            for name, level in draws.quantiles(own[phase], own["session"]).items()
        }
        for phase in phases
    }
