# SPDX-License-Identifier: Apache-2.0
"""per_config.json: the results of a run, config by config; evidence.json: its holds.

A value with an interval is `{value, ci95}`, and what was not measured is null. Costs
are shares of vLLM's own work in the same holds, in %, with us beside them: a machine
that gets slower makes both longer. An interval holds in 95 % of runs, over all looks
that the profile allows, and holds the figure of the next server, too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtax.records.estimate import Estimate
from kvtax.records.profile import ProfileRecord
from kvtax.records.run import IdleCost, ReadCounts, RunRecord, Verdict


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a time."""

    p50: float
    """Half are below it."""
    p90: float
    """Nine in ten are below it."""
    p99: float
    """99 in 100 are below it."""


class Lag(msgspec.Struct, frozen=True):
    """Lateness of requests, by the worst server of a config."""

    p99: float | None
    """99 in 100 were sent sooner after they were due, in ms."""
    budget: float | None
    """The most that p99 may be, in ms."""
    valid: bool
    """Whether all servers kept to it."""


class WindowRecord(msgspec.Struct):
    """Steps at which costs are stated."""

    at_cache_blocks: int
    """|cache| at the highest level below a full cache: the median over the configs."""


class PartCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method of the connector, or a thread of the engine's process."""

    calls_per_step: float | None = None
    """Calls of the method; absent for a thread."""
    us_per_step: float
    """Time of the method without the connector's methods that it called; CPU time of
    the thread."""


class LongCalls(msgspec.Struct, frozen=True):
    """Steps in which the connector's calls took 10 ms more than usual.

    Steps of all phases of all servers count in which at least half of that was CPU time
    of the engine's thread: a stall of the machine takes none.
    """

    count: int
    """How many there were."""
    longest_ms: float
    """By how much the longest exceeds the usual."""
    us_per_step: float
    """All of them together, per step."""
    steps: int
    """Steps of which this is the count."""


class Curve(msgspec.Struct, frozen=True):
    """Time in `schedule()` while the cache grows, by |cache|."""

    cache_blocks: list[float]
    """Middle of each bin."""
    p25_us: list[float]
    """A quarter of the bin's steps took less."""
    p50_us: list[float]
    """Half of them took less."""
    p75_us: list[float]
    """Three quarters of them took less."""


class Measured(msgspec.Struct, kw_only=True):
    """Measurements of one config that need no comparison."""

    n_decode_steps: int = 0
    """Decode-only steps in all phases."""
    n_repeats: int = 0
    """Trials that went well."""
    cache_blocks: dict[str, int] | None = None
    """`min` and `max` |cache| of the decode-only steps."""
    n_window_steps: int = 0
    """Steps behind the quantiles: at most 100,000, thinned evenly."""
    schedule_us: Quantiles | None = None
    """Time in `schedule()` at the stated |cache|, as are the three below."""
    step_us: Quantiles | None = None
    """Time of the whole step."""
    build_meta_us: Quantiles | None = None
    """Time in `build_connector_meta`, a part of `schedule_us`."""
    get_finished_us: Quantiles | None = None
    """Time in the worker's `get_finished`."""
    attribution_us: dict[str, float | None] | None = None
    """Parts that sum to `step`: means over the middle half of the steps, by
    `step_us`."""
    ttft_ms: Quantiles | None = None
    """Time to first token from the intended send, over the ok requests of growth and
    plateau, as are the two below."""
    tpot_ms: Quantiles | None = None
    """Time per output token after the first."""
    e2e_ms: Quantiles | None = None
    """Time to the last token from the intended send."""
    requests: dict[str, int]
    """`scheduled`, `ok`, `failed`, `cancelled`, summed over the repeats."""
    lag_ms: Lag | None
    """Send lag of the worst repeat."""
    records: dict[str, int]
    """`engine_steps` and `worker_steps` that were read, `engine_without_worker`
    (decode-only steps without a worker record), `torn_lines`."""
    reads: ReadCounts | None = None
    """That of trial.json, summed over the repeats; null where no peer was to read."""
    idle: IdleCost | None = None
    """That of trial.json, summed over the repeats."""
    pss_mib: float | None = None
    """That of trial.json, mean over the repeats."""
    connector: PartCost | None = None
    """All calls of the connector at the stated |cache|, as are the two below."""
    methods: dict[str, PartCost] | None = None
    """The same by method, as `scheduler.NAME` or `worker.NAME`."""
    threads: dict[str, PartCost] | None = None
    """CPU time by thread of the engine's process."""
    long_calls: LongCalls | None = None
    """Long calls of the connector; null without one, or without CPU times."""
    error: str | None = None
    """Errors of its failed trials."""


class HeldLevels(msgspec.Struct, frozen=True):
    """A metric at the levels at which |cache| was held.

    In % of vLLM's own work; `memory` is in MiB.
    """

    cache_blocks: list[int]
    """|cache| at each level."""
    levels: list[float]
    """The metric there."""
    errors: list[float]
    """Half the width of the interval of each level."""
    full_adds: Estimate
    """By how much it is more at the highest level than at the lowest."""
    most: float
    """For certain (95 %) no level lies above a lower one by more."""
    unit: float | None
    """1 % of own work in us; null for `memory`."""
    drift_per_pass: float
    """By how much it rises from one pass to the next, whatever the level."""
    age: float | None
    """By how much it rises in the longest time since a reset, whatever the level; null
    where higher levels are always older."""
    shape: str | None
    """Of one that grows: `linear`, `step`, `only when full`, `saturating`, `curved` or
    `not monotone`. Of one that drifts, `age` if with the time since a reset. `falls`
    of one that is flat."""


class Share(msgspec.Struct, frozen=True):
    """A cost per engine step."""

    percent: Estimate
    """In % of vLLM's own work in the same holds."""
    us: float
    """On this machine, in us."""


class RareSteps(msgspec.Struct, frozen=True):
    """Steps in which the connector's calls took long, at each level of |cache|."""

    longer_by_us: float
    """Than usual in their hold."""
    steps: list[int]
    """Steps of the holds."""
    long: list[int]
    """Those of them that took longer."""
    chance: float
    """Chance that they rise so with |cache| if they have nothing to do with it."""


class Judged(Measured, kw_only=True):
    """Results of one config: its measurements, and the statements that they allow."""

    verdict: Verdict
    """The verdict on the config."""
    verdict_of: dict[str, Verdict] = {}
    """The verdict on each metric alone (`kvtax/verdict/metrics.py`), of those that were
    measured."""
    not_measured: list[str] = []
    """Metrics that the run should have measured and has not."""
    held: dict[str, HeldLevels] = {}
    """Each metric, method and thread at the levels of |cache|."""
    rare: RareSteps | None = None
    """Costs in few steps; null without holds."""
    full_adds: Share | None = None
    """What a full cache adds to a step: to the connector's calls, all of them; without
    a connector, to what the scheduler takes."""
    tpot_full_adds: Share | None = None
    """What a full cache adds to the time per output token of a request."""
    over_baseline: Share | None = None
    """What scheduler and connector take more of a step than in the baseline, at the
    stated |cache|; null for the baseline, and where configs cannot be compared."""
    tpot_over_baseline: Share | None = None
    """The same of the time per output token."""
    vs_noop: dict[str, Estimate] = {}
    """Ratio of `schedule` and `step` to those of the floor, the model left out."""
    slope_us_per_1k_blocks: dict[str, Estimate] = {}
    """Growth of `schedule()` over the levels; without an interval."""
    growth_slope_us_per_1k_blocks: Estimate | None
    """The same while |cache| grows under an open load."""
    warnings: list[str] = []
    """Doubts, each with its remedy."""


class NoiseFloor(msgspec.Struct, frozen=True):
    """Difference of two configs that are the same thing, the baseline and its twin."""

    pair: tuple[str, str] | None = None
    """The A/A configs; null if the run has no such pair."""
    over_baseline: Share | None = None
    """Of the twin."""
    differs: bool = False
    """Whether they certainly differ: then no two configs of the run are compared."""


class HostEntry(msgspec.Struct):
    """Results of one host of several."""

    cpu_model: str | None
    """Model of its CPU."""
    repeats: list[int]
    """The repeats that it measured, of all configs."""
    servers: int
    """How many servers these are."""
    servers_that_count: int
    """Those of them that were measured."""
    send_lag_p99_ms: float | None = None
    """How late the load was sent to that one of its servers where it was latest."""
    p50_us: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """By config and time (`schedule`, `step`), the median at the stated |cache|."""


class ServerConditions(msgspec.Struct, frozen=True):
    """Conditions that one server had; null: not recorded."""

    config: str
    """Its config."""
    repeat: int
    """Its repeat."""
    steal_share: float | None = None
    """That of trial.json."""
    others_cores: float | None = None
    """That of trial.json."""
    cold_start: str | None = None
    """That of trial.json."""


class MachineRecord(msgspec.Struct, frozen=True):
    """Conditions of all servers of a run."""

    cores: int | None
    """Logical cores."""
    servers: list[ServerConditions]
    """Conditions by server."""


Grade = Literal["quiet", "busy", "disturbed"]


class GradedServer(ServerConditions, frozen=True):
    """A server's conditions, and the speed of vLLM's own work in its holds."""

    own_us: float | None = None
    """Median of vLLM's own work per step over the holds."""
    own_spread: float | None = None
    """p90 over p10 of the same."""
    holds_out: float | None = None
    """Share of its holds in which the engine's thread waited for a core: they do not
    count."""
    left_out: str | None = None
    """Why its holds do not count; null where they do."""


class MachineEntry(msgspec.Struct, frozen=True):
    """Grade of the machine during the run (`kvtax/verdict/machine.py`)."""

    grade: Grade
    """`quiet`; `busy`, where neighbours slow all work alike; `disturbed`, where one had
    the engine's own core."""
    reasons: list[str]
    """Numbers that a quiet machine would not have; empty if it was quiet."""
    refused: bool
    """Whether so many servers were disturbed that nothing is judged."""
    cores: int | None
    """Logical cores."""
    own_us: float | None
    """Median of the servers' `own_us`."""
    servers: list[GradedServer]
    """Conditions by server."""


class PerConfig(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.per_config/3"
):
    """The results of a run."""

    provenance: dict[str, Any]
    """That of run.json, and `report_git_commit`, the commit of the analysis."""
    profile: ProfileRecord
    """That of run.json."""
    baseline: str | None
    """The config that the others are compared with."""
    floor: str | None
    """The config of the connector that does nothing."""
    window: WindowRecord | None
    """Where costs are stated; null if the configs have nothing in common."""
    noise_floor: NoiseFloor
    """How far two runs of the same thing are apart."""
    warnings: list[str]
    """Doubts about the whole run, each with its remedy."""
    configs: dict[str, Judged]
    """Results by config."""
    hosts: dict[str, HostEntry] | None = None
    """What each host measured, by its address; null for a run on one machine."""
    machine: MachineEntry | None = None
    """How quiet the machine was; null for a run that did not record it."""


class ConfigEvidence(msgspec.Struct, kw_only=True):
    """Measurements of one config."""

    facts: Measured
    """The part of its entry that needs no comparison."""
    holds: dict[str, list[float | None]] = msgspec.field(default_factory=dict)
    """Columns of the table of its holds, a row each (`kvtax/verdict/holds.py`)."""
    growth_slopes: dict[str, Estimate | None] = msgspec.field(default_factory=dict)
    """Growth of `schedule` while |cache| grows under an open load; no interval."""
    curve: Curve | None = None
    """The same, bin by bin."""


class Evidence(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.evidence/1"
):
    """Measurements of a run; `kvtax sweep --report` makes the results from it."""

    run: RunRecord
    """That of run.json."""
    report_git_commit: str | None
    """Commit of the code that read the run's records."""
    window: WindowRecord | None
    """That of per_config.json."""
    configs: dict[str, ConfigEvidence]
    """By config."""
    machine: MachineRecord | None = None
    """Conditions of the servers."""
    hosts: dict[str, HostEntry] | None = None
    """That of per_config.json."""
