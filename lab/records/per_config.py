# SPDX-License-Identifier: Apache-2.0
"""per_config.json: the results of a run, config by config.

An estimate is `{value, ci95}`; quantiles are `{p50, p90, p99}`; what was not measured
is null. "By time" is by `schedule`, `overhead` and `step`, which have a level each; "by
metric" is by these and by what else has a slope and a verdict. An interval holds in
95 % of runs, over all looks that the profile allows.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lab.records.trial import ReadCounts

Verdict = Literal["grows", "drifts", "flat", "inconclusive", "failed"]
Stated = dict[str, Any]
Quantiles = dict[str, int | float]


class WindowRecord(msgspec.Struct):
    """Where levels are stated."""

    at_cache_blocks: int
    """The highest |cache| that all configs reached."""
    batch_mix: dict[str, float]
    """Weight of each batch size."""
    requests_to_fill: dict[str, float] | None
    """Requests until |cache| is that full, by APC."""


class NoiseFloor(msgspec.Struct):
    """How far two runs of the same thing, the baseline and its twin, are apart.

    `slope_us_per_1k_blocks` and `fall_us_per_1k_blocks`, by metric, and `p50_us`, by
    time, hold the estimate of the difference and its size, `floor`. A smaller
    difference is within noise.
    """

    pair: tuple[str, str] | None = None
    """The A/A configs; null if the run has no such pair."""
    slope_us_per_1k_blocks: dict[str, Stated] | None = None
    """Difference of the slopes, by metric."""
    fall_us_per_1k_blocks: dict[str, Stated] | None = None
    """Difference of the falls at a reset, by metric."""
    p50_us: dict[str, Stated] | None = None
    """Difference of the medians at the stated |cache|, by time."""

    def slope_floor(self, metric: str) -> float:
        """0 where there is no pair."""
        return (self.slope_us_per_1k_blocks or {}).get(metric, {}).get("floor", 0.0)

    def fall_floor(self, metric: str) -> float:
        """0 where there is no pair."""
        return (self.fall_us_per_1k_blocks or {}).get(metric, {}).get("floor", 0.0)

    def p50_floor(self, metric: str) -> float:
        """0 where there is no pair."""
        return (self.p50_us or {}).get(metric, {}).get("floor", 0.0)


class ConfigEntry(msgspec.Struct, kw_only=True):
    """What was found of one config; the defaults are those of a config that failed."""

    n_decode_steps: int = 0
    """Decode-only steps in all phases."""
    n_repeats: int = 0
    """Trials that went well."""
    cache_blocks: dict[str, int] | None = None
    """`min` and `max` |cache| of the decode-only steps before the reset."""
    slope_us_per_1k_blocks: dict[str, Stated | None]
    """Growth by metric (`microbench/analysis/metrics.py`); null where it was not
    measured. `ci95` is null where nothing tells how much server processes differ."""
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
    lag_ms: dict[str, Any] | None
    """Send lag of the worst repeat, its `budget`, and whether all were `valid`."""
    records: dict[str, int]
    """`engine_steps` and `worker_steps` that were read, `engine_without_worker`
    (decode-only steps without a worker record), `torn_lines`."""
    reads: ReadCounts | None = None
    """That of trial.json, summed over the repeats; null where no peer was to read."""
    connector: dict[str, Any] | None = None
    """All calls of the connector over all steps of growth, on three axes:
    `us_per_step`, `us_per_s` of the engine's time, `us_per_1k_tokens`, each with its
    `mean` and `slope_per_1k_blocks`."""
    methods: dict[str, Any] | None = None
    """The same by method, as `scheduler.NAME` or `worker.NAME`: `calls_per_step`,
    `us_per_step` (without the connector's methods that it called) and
    `slope_per_1k_blocks`."""
    threads: dict[str, Any] | None = None
    """CPU time by thread of the engine's process in growth: `us_per_step` and
    `slope_per_1k_blocks`."""
    reset_check: dict[str, Any] | None = None
    """Before and after the resets, by metric: `before_us`, `after_us`,
    `fall_us_per_1k_blocks`; beside them `resets` (in each trial),
    `cache_blocks_before`, `cache_blocks_after`, `steps_before`, `steps_after`."""
    linearity: dict[str, Any] | None = None
    """Of the time in `schedule()`: `linear` (`yes`, `no`, `undecided`), `r2` of the
    binned medians, `slope_lower_half`, `slope_upper_half`."""
    verdict_of: dict[str, Verdict]
    """The verdict on each metric alone, of those that were measured."""
    verdict: Verdict = "failed"
    """The verdict on the config."""
    error: str | None = None
    """Errors of its failed trials."""
    warnings: list[str] = []
    """Doubts, each with what to do about it."""
    vs_plain: dict[str, Stated] | None = None
    """Difference of p50 from the baseline, by time, with `within_noise`."""
    tpot_addition: dict[str, Any] | None = None
    """What the config is predicted to add to the baseline's TPOT: `forward_ms` by
    forward time (the run's own first), `sync` and `async`, in `ms` and `percent`;
    beside it `measured_tpot_p50_ms` and `measured_phase`."""
    vs_noop: dict[str, Stated | None] | None = None
    """Ratio of p50 to that of the floor, by time."""

    def level_us(self, metric: str) -> Quantiles | None:
        """The quantiles of `schedule`, `overhead` or `step`."""
        return getattr(self, f"{metric}_us")


class HostEntry(msgspec.Struct):
    """What one host of several measured."""

    cpu_model: str | None
    """Model of its CPU."""
    repeats: list[int]
    """The repeats that it measured, of all configs."""
    servers: int
    """How many servers these are."""
    servers_that_count: int
    """Those of them that were measured and are not set aside."""
    times_as_slow: float | None
    """Median of how many times as slow as usual in this run its servers were, by work
    in which no connector has a part; null where none had it recorded."""
    send_lag_p99_ms: float | None = None
    """How late the load was sent to that one of its servers where it was latest."""
    p50_us: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """By config and time (`schedule`, `step`), the median at the stated |cache|."""


class PerConfig(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.per_config/1"
):
    """The results of a run."""

    provenance: dict[str, Any]
    """That of run.json, and `report_git_commit`, the commit of the analysis."""
    profile: dict[str, Any]
    """That of run.json."""
    window: WindowRecord | None
    """Where levels are stated; null if the configs have nothing in common."""
    noise_floor: NoiseFloor
    """How far two runs of the same thing are apart."""
    slowness_share: dict[str, float] = msgspec.field(default_factory=dict)
    """Each part of a step was divided by the machine's slowness to this power."""
    warnings: list[str]
    """What the run suspects of itself, each with what to do about it."""
    configs: dict[str, ConfigEntry]
    """What was found, by config."""
    hosts: dict[str, HostEntry] | None = None
    """What each host measured, by its address; null for a run on one machine."""
