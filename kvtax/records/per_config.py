# SPDX-License-Identifier: Apache-2.0
"""per_config.json: the results of a run, config by config; evidence.json: its holds.

An estimate is `{value, ci95}`; quantiles are `{p50, p90, p99}`; what was not measured
is null. "By time" is by `schedule`, `overhead` and `step`, which have a level each; "by
metric" is by these and by what else has a slope and a verdict. An interval holds in
95 % of runs, over all looks that the profile allows.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtax.records.estimate import Estimate
from kvtax.records.profile import ProfileRecord
from kvtax.records.run import IdleCost, ReadCounts, RunRecord, Verdict

Quantiles = dict[str, int | float]


class WindowRecord(msgspec.Struct):
    """Steps at which levels are stated."""

    at_cache_blocks: int
    """|cache| at the highest level below a full cache: the median over the configs."""
    requests_to_fill: dict[str, float] | None
    """Requests until |cache| is that full, by APC."""


class BaselineDifference(Estimate, frozen=True, kw_only=True):
    """Difference of a config from the baseline."""

    within_noise: bool = False
    """Whether the interval holds 0, or the A/A pair differs by more."""


class PartCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method of the connector, or a thread of the engine's process."""

    calls_per_step: float | None = None
    """Calls of the method; absent for a thread."""
    slope_per_1k_blocks: Estimate | None
    """Growth of `us_per_step`."""
    us_per_step: float
    """Time of the method without the connector's methods that it called; CPU time of
    the thread."""


class HeldLevels(msgspec.Struct, frozen=True):
    """A metric at the levels at which |cache| was held."""

    cache_blocks: list[int]
    """|cache| at each level."""
    us: list[float]
    """The metric there: a mean without the slowest tenth of the steps."""
    full_adds_us: Estimate
    """What it is more at the highest level than at the lowest."""
    most_us: float
    """For certain (95 %) no level lies above a lower one by more."""
    most_us_per_1k_blocks: float
    """The same over the range of |cache|."""
    drift_us_per_pass: float
    """By how much it rises from one pass to the next, whatever the level."""
    age_us: float | None
    """By how much it rises in the longest time since a reset, whatever the level; null
    where higher levels are always older."""
    shape: str | None
    """Of one that grows: `linear`, `step`, `only when full`, `saturating`, `curved` or
    `not monotone`. Of one that drifts, `age` if with the time since a reset. `falls`
    of one that is flat."""


class HeldTpot(msgspec.Struct, frozen=True):
    """TPOT of the requests that decode while the stated |cache| is held."""

    p50_ms: float
    """Median, its mean over servers."""
    over_baseline_ms: Estimate | None
    """Difference from the baseline's, by how much servers of one config differ."""


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


class Addition(msgspec.Struct, frozen=True):
    """Predicted addition to TPOT."""

    ms: float
    """In ms."""
    percent: float | None
    """Of the baseline's."""


class TpotAddition(msgspec.Struct, frozen=True):
    """Addition of a config to the baseline's TPOT."""

    forward_ms: dict[str, dict[str, Addition]]
    """Predictions by forward time (the run's own first), for `sync` and `async`."""
    measured_tpot_p50_ms: float | None
    """Measured difference of the medians."""
    measured_phase: str
    """Of which requests: `plateau`, or `all`."""


class NoiseFloor(msgspec.Struct):
    """Difference of two runs of the same thing, the baseline and its twin."""

    pair: tuple[str, str] | None = None
    """The A/A configs; null if the run has no such pair."""
    slope_us_per_1k_blocks: dict[str, Estimate] | None = None
    """Difference of the slopes, by metric."""
    p50_us: dict[str, Estimate] | None = None
    """Difference of the medians at the stated |cache|, by time."""

    def slope(self, metric: str) -> float:
        """Return the size of the difference of the slopes; 0 without a pair."""
        return _size(self.slope_us_per_1k_blocks, metric)

    def p50(self, metric: str) -> float:
        """Return the size of the difference of the medians; 0 without a pair."""
        return _size(self.p50_us, metric)

    def covers(self, metric: str, difference: Estimate) -> bool:
        """Return whether a difference of medians may be none, or is the pair's."""
        low, high = difference.ci95 or (difference.value, difference.value)
        return low <= 0 <= high or abs(difference.value) <= self.p50(metric)


def _size(differences: dict[str, Estimate] | None, metric: str) -> float:
    difference = (differences or {}).get(metric)
    return abs(difference.value) if difference else 0.0


class ConfigEntry(msgspec.Struct, kw_only=True):
    """Results of one config; the defaults are those of a config that failed."""

    n_decode_steps: int = 0
    """Decode-only steps in all phases."""
    n_repeats: int = 0
    """Trials that went well."""
    cache_blocks: dict[str, int] | None = None
    """`min` and `max` |cache| of the decode-only steps."""
    slope_us_per_1k_blocks: dict[str, Estimate | None]
    """Growth by metric (`kvtax/verdict/metrics.py`); null where it was not
    measured."""
    n_window_steps: int = 0
    """Steps behind the levels: at most 100,000, thinned evenly."""
    schedule_us: Quantiles | None = None
    """Time in `schedule()`, with `at_cache_blocks`, the |cache| of all levels."""
    overhead_us: Quantiles | None = None
    """What scheduler and connector take: `schedule_us` + `update_us` + the connector's
    calls in the worker (`bind_us`, `start_load_kv_us`, `wait_for_save_us`,
    `get_finished_us`) of the same step, with `at_cache_blocks`."""
    step_us: Quantiles | None = None
    """Time of the whole step, with `at_cache_blocks`."""
    build_meta_us: Quantiles | None = None
    """Time in `build_connector_meta`, a part of `schedule_us`."""
    update_us: Quantiles | None = None
    """Time in `update_from_output()`."""
    get_finished_us: Quantiles | None = None
    """Time in the worker's `get_finished`."""
    start_load_kv_us: Quantiles | None = None
    """Time in the worker's `start_load_kv`."""
    bind_us: Quantiles | None = None
    """Time in the worker's `bind_connector_metadata`."""
    wait_for_save_us: Quantiles | None = None
    """Time in the worker's `wait_for_save`."""
    execute_model_us: Quantiles | None = None
    """Time in the worker's `execute_model`, the connector's calls included."""
    attribution_us: dict[str, float | None] | None = None
    """Parts that sum to `step`: means over the middle half of the steps, by
    `step_us`."""
    ttft_ms: Quantiles | None = None
    """Time to first token from the intended send, over the ok requests of growth and
    plateau, as are the five below."""
    ttft_sent_ms: Quantiles | None = None
    """Time to first token from the actual send."""
    tpot_ms: Quantiles | None = None
    """Time per output token after the first."""
    tpot_plateau_ms: Quantiles | None = None
    """The same for the plateau alone."""
    e2e_ms: Quantiles | None = None
    """Time to the last token from the intended send."""
    e2e_sent_ms: Quantiles | None = None
    """Time to the last token from the actual send."""
    requests: dict[str, int]
    """`scheduled`, `ok`, `failed`, `cancelled`, summed over the repeats."""
    lag_ms: dict[str, float | bool | None] | None
    """Send lag of the worst repeat, its `budget`, and whether all were `valid`."""
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
    """All calls of the connector, over the steps of all holds."""
    methods: dict[str, PartCost] | None = None
    """The same by method, as `scheduler.NAME` or `worker.NAME`."""
    threads: dict[str, PartCost] | None = None
    """CPU time by thread of the engine's process."""
    held: dict[str, HeldLevels] = msgspec.field(default_factory=dict)
    """What each metric is at the levels of |cache|."""
    held_tpot: HeldTpot | None = None
    """TPOT at the stated |cache|; null where it was not measured."""
    rare: RareSteps | None = None
    """Costs in few steps; null without holds."""
    growth_slope_us_per_1k_blocks: Estimate | None = None
    """Slope of the time in `schedule()` while |cache| grows under an open load, without
    what servers differ by."""
    verdict_of: dict[str, Verdict]
    """The verdict on each metric alone, of those that were measured."""
    not_measured: list[str] = []
    """Metrics that the run should have measured and has not."""
    verdict: Verdict = "failed"
    """The verdict on the config."""
    error: str | None = None
    """Errors of its failed trials."""
    warnings: list[str] = []
    """Doubts, each with what to do about it."""
    vs_plain: dict[str, BaselineDifference] | None = None
    """Difference of p50 from the baseline, by time."""
    tpot_addition: TpotAddition | None = None
    """What the config adds to the baseline's TPOT."""
    vs_noop: dict[str, Estimate | None] | None = None
    """Ratio of p50 to that of the floor, by time."""

    def level_us(self, metric: str) -> Quantiles | None:
        """Return the quantiles of `schedule`, `overhead` or `step`."""
        levels = {
            "schedule": self.schedule_us,
            "overhead": self.overhead_us,
            "step": self.step_us,
        }
        return levels[metric]


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
    yardstick_us: float | None = None
    """Median time of the yardstick over the holds."""
    yardstick_spread: float | None = None
    """p90 over p10 of the yardstick's medians in the holds."""
    steal_share: float | None = None
    """That of trial.json."""
    others_cores: float | None = None
    """That of trial.json."""


Grade = Literal["quiet", "uneven", "busy"]


class MachineEntry(msgspec.Struct, frozen=True):
    """Grade of the machine during the run (`kvtax/verdict/machine.py`)."""

    grade: Grade
    """The worst that a number gives."""
    reasons: list[str]
    """Numbers that a quiet machine would not have; empty if it was quiet."""
    cores: int | None
    """Logical cores."""
    yardstick_us: float | None
    """Median of the servers' `yardstick_us`."""
    yardstick_apart: float | None
    """Highest of these over the lowest, less 1; of several hosts the worst."""
    servers: list[ServerConditions]
    """Conditions by server."""


class PerConfig(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.per_config/2"
):
    """The results of a run."""

    provenance: dict[str, Any]
    """That of run.json, and `report_git_commit`, the commit of the analysis."""
    profile: ProfileRecord
    """That of run.json."""
    window: WindowRecord | None
    """Where levels are stated; null if the configs have nothing in common."""
    noise_floor: NoiseFloor
    """How far two runs of the same thing are apart."""
    warnings: list[str]
    """What the run suspects of itself, each with what to do about it."""
    configs: dict[str, ConfigEntry]
    """What was found, by config."""
    hosts: dict[str, HostEntry] | None = None
    """What each host measured, by its address; null for a run on one machine."""
    machine: MachineEntry | None = None
    """How quiet the machine was; null for a run that did not record it."""


class ConfigEvidence(msgspec.Struct, kw_only=True):
    """Measurements of one config."""

    facts: ConfigEntry
    """Its entry in per_config.json without verdicts and comparisons."""
    holds: dict[str, list[float | None]] = msgspec.field(default_factory=dict)
    """Columns of the table of its holds, a row each: `repeat`, `hold`, `level`, `many`
    (1 with many decoders), `cache_blocks`, `age_s`, `time_s`, `steps` and `long` (those
    that took 1 ms longer than usual), `rest` (the step without scheduler and connector)
    and each metric, in us per step."""
    log_p50: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Logarithms of the medians at the stated |cache|, by time, of each server."""
    growth_slopes: dict[str, Estimate | None] = msgspec.field(default_factory=dict)
    """Growth by time while |cache| grows under an open load."""
    interrupted_share: float = 0.0
    """Share of its steps that took several times as long as usual."""


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
    machine: MachineEntry | None = None
    """That of per_config.json."""
    hosts: dict[str, HostEntry] | None = None
    """That of per_config.json."""
    figures: list[str] = []
    """Names of the figures that were drawn."""
