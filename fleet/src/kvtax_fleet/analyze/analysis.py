# SPDX-License-Identifier: Apache-2.0
"""The whole analysis of one run: analysis.json, from which the report is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl
from kvtax.stats.quantiles import SessionDraws

from kvtax_fleet.analyze import (
    cache,
    fleet_warnings,
    load,
    request_tables,
    what_if,
)
from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.comparison import Comparison, comparisons
from kvtax_fleet.analyze.fleet_warnings import WarningEntry
from kvtax_fleet.analyze.frames import requests_frame, steady_window_ns
from kvtax_fleet.analyze.offloads import Offloads, offloads
from kvtax_fleet.analyze.ranking import Rank, ranking
from kvtax_fleet.analyze.roofline import Model
from kvtax_fleet.records.arm import OUR_PROXY

SCHEMA = "kvtax.fleet_analysis/1"


class Made(msgspec.Struct):
    """Conditions of the run, from arm.json."""

    versions: dict[str, Any]
    """As `provenance` in run.json."""
    trace: dict[str, Any]
    """Empty if the run names none."""
    instances: int
    """vLLM servers of an arm."""
    open_loop: bool | None
    """Whether sessions began when the trace says."""
    time_scale: float | None
    """How much faster than the trace: divides arrival and think times."""
    time_factor: float | None
    """Factor on the simulated forward."""
    virtual: bool = False
    """Whether the run was in virtual time."""


class Migration(msgspec.Struct):
    """Simulated moves of sessions, on the first run that finished."""

    of: str
    """The arm."""
    model: str
    """Name of the model."""
    kv_bytes_per_token: int
    """Bytes of KV per token."""
    bandwidth_gbit_s: float
    """Bandwidth of a move."""
    policies: list[what_if.MigrationRule]
    """One entry per rule."""


class Repeat(msgspec.Struct, kw_only=True):
    """One arm in one repeat."""

    repeat: int
    """Counts from 0."""
    status: str
    """`ok`, or how the run ended."""
    error: str | None
    """Why it failed."""
    lag_ms: dict[str, float] | None
    """Send lag by quantile; null if nothing was sent."""
    valid: bool | None
    """Whether the send lag was within its budget; null if that was not checked."""
    apc: cache.Apc
    """Prefix cache hits."""
    kv_blocks: dict[str, int] = {}
    """KV cache blocks by instance."""
    imbalance: load.Imbalance
    """Tokens by instance."""
    hotspot: load.Skew | None
    """Skew of the tokens under way; null without any."""
    accumulation: load.Accumulation | None
    """Sessions and context tokens by instance; null where no request was placed."""
    gpu: dict[str, load.GpuUse] | None
    """By GPU; null without samples."""
    mirror: cache.MirrorDifference | None
    """The proxy's mirror against the KV events; null where one is missing."""


class ArmAnalysis(msgspec.Struct, kw_only=True):
    """All repeats of one arm."""

    router: str = OUR_PROXY
    """What routed the requests."""
    policy: str | None
    """Policy of the proxy."""
    connector: str | None
    """Connector config; null without one."""
    concurrency: int | None
    """Requests in flight per instance; in an open loop at most."""
    outcomes: request_tables.Outcomes | None
    """Requests by outcome; null without any."""
    latency: request_tables.Latency
    """By window, then by class of the request or `all`."""
    repeats: list[Repeat]
    """One entry per repeat."""
    interference: load.Interference | None
    """TPOT over the prefill under way; null with too few requests."""
    cache_state: str | None
    """`mirror` or `exact`: how the proxy knows what is cached."""
    belief: cache.Belief | None
    """Error of that knowledge; null if it was not checked."""
    offloads: Offloads | None
    """Prefills on another instance; null without any."""


class FleetAnalysis(msgspec.Struct, tag_field="schema", tag=SCHEMA):
    """analysis.json. Fields with a default are missing in the oldest ones."""

    experiment: str | None
    """Name of the experiment; null for a run of its own."""
    made: Made
    """Conditions of the run."""
    workload: request_tables.Workload | None
    """The requests; null without any."""
    arms: dict[str, ArmAnalysis]
    """By name."""
    comparisons: list[Comparison]
    """Each arm with its baseline."""
    migration: Migration | None
    """Null if no run finished."""
    warnings: list[WarningEntry]
    """What makes a figure doubtful."""
    ranking: list[Rank] = []
    """Arms by mean E2E, the best of each concurrency first; missing in old ones."""


@dataclass(frozen=True)
class Analysis:
    """The results, and the requests that they are of."""

    results: FleetAnalysis
    requests: pl.DataFrame

    @property
    def document(self) -> dict[str, Any]:
        """The results as analysis.json has them."""
        document: dict[str, Any] = msgspec.to_builtins(self.results)
        return document

    @property
    def sound(self) -> bool:
        """Return whether every run finished and no comparison is refused."""
        arms = self.results.arms.values()
        finished = all(r.status == "ok" for arm in arms for r in arm.repeats)
        return finished and not any(c.refused for c in self.results.comparisons)


def of(requests: pl.DataFrame, run: ArmRun) -> pl.DataFrame:
    """Select the requests of one arm and repeat."""
    info = run.info
    return requests.filter(
        (pl.col("arm") == info.arm) & (pl.col("repeat") == info.repeat)
    )


def block_tokens(runs: list[ArmRun]) -> int:
    """Return the largest block of any instance; 1 where none is named."""
    return max(
        (instance.block_tokens for run in runs for instance in run.info.instances),
        default=1,
    )


def names(run: ArmRun) -> list[str]:
    return [instance.name for instance in run.info.instances]


def analyse(runs: list[ArmRun], model: str, bandwidth_gbit_s: float) -> Analysis:
    """Analyse every arm and repeat of one run.

    Raises RecordsError, HardwareError and ConfigError.
    """
    link = what_if.Link(Model.read(model).kv_bytes_per_token, bandwidth_gbit_s)
    # A run that failed does not show what its arm does: it is counted, and no more.
    finished = [run for run in runs if run.info.status == "ok"]
    everything, requests = requests_frame(runs), requests_frame(finished)
    draws = SessionDraws(requests["session"])
    under_way = {
        arm: pl.concat(
            [load.prefill_points(of(requests, run), names(run)) for run in own]
        )
        for arm, own in by_arm(finished).items()
    }
    warnings = fleet_warnings.run_warnings(runs)
    counted = request_tables.outcomes(everything)
    levels = request_tables.latency_table(requests, draws)
    arms = {}
    for arm, own in by_arm(runs).items():
        info = own[0].info
        answered = requests.filter(pl.col("arm") == arm)
        arms[arm] = ArmAnalysis(
            router=info.router,
            policy=info.policy,
            connector=info.connector,
            concurrency=info.concurrency,
            outcomes=counted.get(arm),
            latency=levels.get(arm, {}),
            repeats=[_repeat(run, of(everything, run), warnings) for run in own],
            interference=load.interference(under_way[arm], draws)
            if arm in under_way
            else None,
            cache_state=info.cache_state,
            belief=cache.belief(answered, block_tokens(own)),
            offloads=offloads(own, answered, draws),
        )
    compared = comparisons(runs, requests, draws)
    results = FleetAnalysis(
        experiment=runs[0].info.experiment,
        made=_made(runs[0]),
        workload=request_tables.workload(of(everything, runs[0])),
        arms=arms,
        comparisons=compared,
        ranking=ranking(finished, requests, compared),
        migration=_migration(finished, requests, model, link),
        warnings=warnings,
    )
    return Analysis(results, requests)


def by_arm(runs: list[ArmRun]) -> dict[str, list[ArmRun]]:
    arms: dict[str, list[ArmRun]] = {}
    for run in runs:
        arms.setdefault(run.info.arm, []).append(run)
    return arms


def _made(run: ArmRun) -> Made:
    info = run.info
    return Made(
        versions=info.versions,
        trace=msgspec.to_builtins(info.trace) if info.trace else {},
        instances=len(info.instances),
        open_loop=info.open_loop,
        time_scale=info.time_scale,
        time_factor=info.time_factor,
        virtual=info.virtual,
    )


def _migration(
    runs: list[ArmRun], requests: pl.DataFrame, model: str, link: what_if.Link
) -> Migration | None:
    """Simulate on the first run that finished: the baseline, where it did."""
    if not runs:
        return None
    run = runs[0]
    window_ns = steady_window_ns(run.end)
    return Migration(
        of=run.info.arm,
        model=model,
        kv_bytes_per_token=link.kv_bytes_per_token,
        bandwidth_gbit_s=link.bandwidth_gbit_s,
        policies=what_if.migrations(of(requests, run), names(run), link, window_ns),
    )


def _repeat(
    run: ArmRun, requests: pl.DataFrame, warnings: list[WarningEntry]
) -> Repeat:
    hits, window_ns = cache.apc(run, requests), steady_window_ns(run.end)
    warnings += fleet_warnings.arm_warnings(run, requests)
    warnings += fleet_warnings.cache_warnings(run.info.arm, run.info.repeat, hits)
    return Repeat(
        repeat=run.info.repeat,
        status=run.info.status,
        error=run.info.error,
        lag_ms=run.end.lag_ms if run.end else None,
        valid=run.end.valid if run.end else None,
        apc=hits,
        kv_blocks=cache.kv_blocks(run),
        imbalance=load.token_imbalance(requests, names(run)),
        hotspot=load.hotspot(requests, names(run), window_ns),
        accumulation=load.accumulation(requests, names(run), window_ns),
        gpu=load.gpu_use(run.folder, requests),
        mirror=cache.mirror_against_exact(run.folder),
    )
