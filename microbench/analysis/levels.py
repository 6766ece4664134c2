# SPDX-License-Identifier: Apache-2.0
"""What a step costs at a stated |cache|, comparable between configs.

The stated |cache| is the highest that all configs reached; a step counts if its
|cache| is within WINDOW of it, before the prefix-cache reset. Batch sizes are held by
direct standardisation: only batch sizes that every config has there count, and each
weighs its average share over the configs (`mix`), whatever its share in one config.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lab.records.phases import Phase
from lab.records.warning import RunWarning
from lab.stats.estimate import Floats, Ints
from lab.stats.processes import Repeats
from lab.stats.quantiles import mix_weights, weighted_quantiles
from microbench.analysis.metrics import Metric
from microbench.analysis.middle import by_repeat, repeats_of
from microbench.analysis.remedies import doubt
from microbench.analysis.steps import STEP_TIMES

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# +-5 %: wide enough for a plateau, and a slope blurs its median by less than 5 %.
WINDOW = 0.05
# A batch size with fewer steps than this in a config is not compared.
MIN_STEPS_PER_BATCH = 20
# Quantiles of 100,000 steps are as good as of millions; every k-th step is kept.
MAX_STEPS = 100_000
# A config that reaches less than this share of the median reach does not pull the
# stated |cache| down for all; it gets no levels instead.
MIN_REACH = 0.5


@dataclass(frozen=True)
class Window:
    """Which steps count, and the weight of each batch size (sums to 1)."""

    at_cache_blocks: int
    mix: dict[int, float]

    def select(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Steps near the stated |cache| before the reset, of any batch size."""
        near = pl.col("cache_blocks").is_between(
            self.at_cache_blocks * (1 - WINDOW), self.at_cache_blocks * (1 + WINDOW)
        )
        return steps.filter(near, pl.col("phase") < Phase.AFTER_RESET)


class Level:
    """The steps of one config in a window, weighted to a mix of batch sizes."""

    def __init__(self, steps: pl.DataFrame, mix: dict[int, float]) -> None:
        kept = thin(steps.filter(pl.col("batch").is_in(list(mix))), MAX_STEPS)
        self.steps: pl.DataFrame = kept
        self.mix = mix
        self.batch: Ints = kept["batch"].cast(pl.Int64).to_numpy()
        self.weights: Floats = mix_weights(self.batch, mix)

    def quantiles(self, time: str) -> dict[str, float] | None:
        """p50, p90, p99 of `time` in us, None where it was not measured."""
        values, known = self._known(time)
        if not known.any():
            return None
        numbers = weighted_quantiles(
            values[known], self.weights[known], tuple(QUANTILES.values())
        )
        return {name: round(v, 3) for name, v in zip(QUANTILES, numbers, strict=True)}

    def middle_by_repeat(self, metric: Metric, seed: int) -> Repeats | None:
        """The middle of `metric` in us in each server process."""
        found = by_repeat(self.steps, metric, self.mix, seed)
        return repeats_of(found, float(np.mean([value for value, _ in found.values()])))

    def _known(self, time: str) -> tuple[Floats, Ints]:
        values = self.steps[time].cast(pl.Float64).to_numpy()
        return values, np.isfinite(values) & (self.weights > 0)

    def attribution_us(self) -> dict[str, float | None]:
        """Mean parts of the middle half of the steps, which sum to their step time.

        The mean over the steps whose step_us lies between its 25th and 75th
        percentile (interquartile mean): means add up, and the tails are out.
        `other` is what lies between the parts: output handling between the model
        and update_from_output, and queueing. A part not measured is None, counted 0.
        """
        whole = self.steps.with_columns(pl.Series("weight", self.weights))
        if whole["execute_model_us"].null_count() < whole.height:
            whole = whole.filter(pl.col("execute_model_us").is_not_null())
        step = whole["step_us"].cast(pl.Float64).to_numpy()
        low, high = weighted_quantiles(step, whole["weight"].to_numpy(), (0.25, 0.75))
        middle = whole.filter(pl.col("step_us").is_between(low, high))
        weight = middle["weight"].to_numpy()

        def mean(name: str) -> float | None:
            values = middle[name].cast(pl.Float64)
            if values.null_count() == len(values):
                return None
            return float(np.average(values.fill_null(0).to_numpy(), weights=weight))

        means = {name: mean(name) for name in STEP_TIMES}
        return split_step(means)


def split_step(means: dict[str, float | None]) -> dict[str, float | None]:
    """Parts that sum to step_us from the nested times of a step, all in us."""
    of = {name: value or 0.0 for name, value in means.items()}
    hooks = ("bind_us", "start_load_kv_us", "wait_for_save_us", "get_finished_us")
    in_execute = sum(of[name] for name in hooks)
    parts: dict[str, float | None] = {
        "schedule_without_build_meta": of["schedule_us"] - of["build_meta_us"],
        "build_meta": means["build_meta_us"],
        **{name.removesuffix("_us"): means[name] for name in hooks},
        "execute_model_rest": of["execute_model_us"] - in_execute,
        "update": means["update_us"],
        "other": of["step_us"]
        - of["schedule_us"]
        - of["execute_model_us"]
        - of["update_us"],
    }
    parts["step"] = of["step_us"]
    return {k: None if v is None else round(v, 3) for k, v in parts.items()}


def thin(steps: pl.DataFrame, most: int) -> pl.DataFrame:
    """Every k-th step, so that at most `most` are left."""
    every = -(-steps.height // most) if steps.height else 1
    return steps if every == 1 else steps.gather_every(every)


def reach_blocks(steps: pl.DataFrame) -> int:
    """|cache| that 1 % of the steps before the reset are above (0 if none)."""
    before = steps.filter(pl.col("phase") < Phase.AFTER_RESET)["cache_blocks"]
    top = before.quantile(0.99)
    return 0 if top is None else int(top)


def choose_window(
    steps_of: dict[str, pl.DataFrame],
) -> tuple[Window | None, list[RunWarning]]:
    """The window for all configs, and what to warn of; None if there is none."""
    reach = {name: reach_blocks(steps) for name, steps in steps_of.items()}
    usual = float(np.median(list(reach.values()))) if reach else 0
    if usual <= 0:
        message = "no config has decode-only steps with blocks in the cache"
        return None, [doubt("empty_cache", message)]
    short = [name for name, top in reach.items() if top < MIN_REACH * usual]
    warnings = [
        doubt(
            "short_reach",
            f"{name}: reached {reach[name]} cached blocks, less than half of the usual "
            f"{usual:.0f}; left out of the comparison at a stated |cache|",
        )
        for name in short
    ]
    compared = [name for name in reach if name not in short]
    bare = Window(min(reach[name] for name in compared), {})
    tables = [bare.select(steps_of[name]) for name in compared]
    mix = common_mix([table["batch"].to_numpy() for table in tables])
    if not mix:
        message = (
            f"no batch size has {MIN_STEPS_PER_BATCH} steps in every config near "
            f"{bare.at_cache_blocks} cached blocks: no levels"
        )
        return None, [*warnings, doubt("batch_sizes_apart", message)]
    for name, table in zip(compared, tables, strict=True):
        share = float(np.isin(table["batch"].to_numpy(), list(mix)).mean())
        if share < 0.5:
            message = (
                f"{name}: only {share:.0%} of its steps near the stated |cache| have "
                "a batch size that all configs share"
            )
            warnings.append(doubt("batch_sizes_apart", message))
    return Window(bare.at_cache_blocks, mix), warnings


def common_mix(
    batches: list[Ints], least: int = MIN_STEPS_PER_BATCH
) -> dict[int, float]:
    """Average share of each batch size with at least `least` steps in every array."""
    shares: list[dict[int, float]] = []
    for batch in batches:
        sizes, counts = np.unique(batch, return_counts=True)
        enough = counts >= least
        total = max(int(counts.sum()), 1)
        shares.append(
            {
                int(size): float(count) / total
                for size, count in zip(sizes[enough], counts[enough], strict=True)
            }
        )
    common = set.intersection(*(set(share) for share in shares)) if shares else set()
    mean = {size: float(np.mean([s[size] for s in shares])) for size in sorted(common)}
    total = sum(mean.values())
    return {size: share / total for size, share in mean.items()}
