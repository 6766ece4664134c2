# SPDX-License-Identifier: Apache-2.0
"""The whole analysis of one run: analysis.json, from which the report is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from fleet.analyze import interference
from fleet.analyze.accumulation import accumulation
from fleet.analyze.balance import hotspot, token_imbalance
from fleet.analyze.belief import belief
from fleet.analyze.cache import apc, kv_blocks
from fleet.analyze.comparison import comparisons
from fleet.analyze.frames import requests_frame, steady_window_ns
from fleet.analyze.gpu import gpu_use
from fleet.analyze.hardware import Model
from fleet.analyze.latency import latency_table
from fleet.analyze.migration import Link, migrations
from fleet.analyze.mirror import mirror_against_exact
from fleet.analyze.moves import moves
from fleet.analyze.offline import disagreements
from fleet.analyze.offloads import offloads
from fleet.analyze.outcomes import outcomes
from fleet.analyze.records import ArmRun
from fleet.analyze.sessions import SessionDraws
from fleet.analyze.substrate import layer_of, substrate
from fleet.analyze.warn import (
    ArmWarning,
    arm_warnings,
    cache_warnings,
    noise_warnings,
    offline_warnings,
    run_warnings,
)
from fleet.analyze.workload import workload
from lab.records.arm import OUR_PROXY, ArmRecord

SCHEMA = "kvtax.fleet_analysis/1"


@dataclass(frozen=True)
class Analysis:
    """The document, and the frames that the figures draw."""

    document: dict[str, Any]
    runs: list[ArmRun]
    requests: pl.DataFrame
    interference: dict[str, pl.DataFrame]

    @property
    def sound(self) -> bool:
        """Whether every run finished and no comparison is refused."""
        arms = self.document["arms"].values()
        finished = all(r["status"] == "ok" for arm in arms for r in arm["repeats"])
        return finished and not any(c["refused"] for c in self.document["comparisons"])

    def of(self, run: ArmRun) -> pl.DataFrame:
        return of(self.requests, run)


def of(requests: pl.DataFrame, run: ArmRun) -> pl.DataFrame:
    """The requests of one arm and repeat."""
    info = run.info
    return requests.filter(
        (pl.col("arm") == info.arm) & (pl.col("repeat") == info.repeat)
    )


def block_tokens(runs: list[ArmRun]) -> int:
    """The largest block of any instance; 1 where none is named."""
    return max(
        (one.block_tokens for run in runs for one in run.info.instances), default=1
    )


def names(run: ArmRun) -> list[str]:
    return [instance.name for instance in run.info.instances]


def analyse(runs: list[ArmRun], model: str, bandwidth_gbit_s: float) -> Analysis:
    """Every arm and repeat of one run.

    Raises RecordsError, HardwareError and ConfigError.
    """
    link = Link(Model.read(model).kv_bytes_per_token, bandwidth_gbit_s)
    # A run that failed does not show what its arm does: it is counted, and no more.
    finished = [run for run in runs if run.info.status == "ok"]
    everything, requests = requests_frame(runs), requests_frame(finished)
    draws = SessionDraws(requests["session"])
    points = {
        arm: interference.points_of([(of(requests, run), names(run)) for run in own])
        for arm, own in by_arm(finished).items()
    }
    warnings = run_warnings(runs)
    counted, levels = outcomes(everything), latency_table(requests, draws)
    arms = {}
    for arm, own in by_arm(runs).items():
        offline = disagreements(own[0].folder)
        warnings += offline_warnings(arm, offline)
        answered = requests.filter(pl.col("arm") == arm)
        arms[arm] = {
            "router": own[0].info.router,
            "policy": _policy(own[0].info),
            "connector": own[0].info.connector,
            "concurrency": own[0].info.concurrency,
            "outcomes": counted.get(arm),
            "latency": levels.get(arm, {}),
            "repeats": [_repeat(run, of(everything, run), warnings) for run in own],
            "interference": interference.slope(points[arm], draws)
            if arm in points
            else None,
            "cache_state": own[0].info.cache_state,
            "belief": belief(answered, block_tokens(own)),
            "offline": offline,
            "offloads": offloads(own, answered, draws),
            "moves": moves(answered),
        }
    compared, spreads = comparisons(runs, requests, draws)
    document = {
        "schema": SCHEMA,
        "experiment": runs[0].info.experiment,
        "made": _made(runs[0]),
        "workload": workload(of(everything, runs[0])),
        "arms": arms,
        "comparisons": compared,
        "migration": _migration(finished, requests, model, link),
        "substrate": substrate(
            requests,
            arms,
            {arm: layer_of(own[0].info) for arm, own in by_arm(runs).items()},
            {c["arm"] for c in compared if c["refused"]},
            draws,
            spreads,
        ),
        "warnings": [
            msgspec.to_builtins(one) for one in warnings + noise_warnings(compared)
        ],
    }
    return Analysis(document, finished, requests, points)


def _policy(info: ArmRecord) -> str | None:
    """Its name, with that of a router that is not ours: equal names mean less there."""
    ours = info.router == OUR_PROXY
    return info.policy if ours else f"{info.policy} of {info.router}"


def by_arm(runs: list[ArmRun]) -> dict[str, list[ArmRun]]:
    found: dict[str, list[ArmRun]] = {}
    for run in runs:
        found.setdefault(run.info.arm, []).append(run)
    return found


def _made(run: ArmRun) -> dict[str, Any]:
    """How the run was made, as arm.json says."""
    info = run.info
    return {
        "versions": info.versions,
        "trace": msgspec.to_builtins(info.trace) if info.trace else {},
        "instances": len(info.instances),
        "open_loop": info.open_loop,
        "time_scale": info.time_scale,
        "time_factor": info.time_factor,
        "virtual": info.virtual,
    }


def _migration(
    runs: list[ArmRun], requests: pl.DataFrame, model: str, link: Link
) -> dict[str, Any] | None:
    """Simulated on the first run that finished: the baseline, where it did."""
    if not runs:
        return None
    run = runs[0]
    window_ns = steady_window_ns(run.end)
    return {
        "of": run.info.arm,
        "model": model,
        "kv_bytes_per_token": link.kv_bytes_per_token,
        "bandwidth_gbit_s": link.bandwidth_gbit_s,
        "policies": migrations(of(requests, run), names(run), link, window_ns),
    }


def _repeat(
    run: ArmRun, requests: pl.DataFrame, warnings: list[ArmWarning]
) -> dict[str, Any]:
    cache, window_ns = apc(run, requests), steady_window_ns(run.end)
    warnings += arm_warnings(run, requests)
    warnings += cache_warnings(run.info.arm, run.info.repeat, cache)
    return {
        "repeat": run.info.repeat,
        "status": run.info.status,
        "error": run.info.error,
        "lag_ms": run.end and run.end.lag_ms,
        "valid": run.end and run.end.valid,
        "apc": cache,
        "kv_blocks": kv_blocks(run),
        "imbalance": token_imbalance(requests, names(run)),
        "hotspot": hotspot(requests, names(run), window_ns),
        "accumulation": accumulation(requests, names(run), window_ns),
        "gpu": gpu_use(run.folder, requests),
        "mirror": mirror_against_exact(run.folder),
    }
