# SPDX-License-Identifier: Apache-2.0
"""Load of instances over time: tokens and sessions under way, hotspots, busy GPUs.

Sums of intervals, each with a weight and an owner, are step functions (`Steps`); every
"load" or "concurrent" here is one of these.

Interference: does TPOT rise with the prefill under way at the same instance? For each
request that ended ok, x is the mean over its decode (first token to end) of the new
tokens then waiting for their first token at its instance, in thousands, and y its TPOT
in ms. The slope is least squares in each arm; its interval draws sessions. x is a mean
over time and not a sum, so that a slow decode does not see more by lasting.

Accumulation: a session lives at the instance of its latest request, from that request's
send until its next request is sent or, after its last one, until that ends. Its tokens
are the context after that turn: prompt and generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
from kvtax.records import RecordsError
from kvtax.records.estimate import Estimate
from kvtax.stats.distribution import Distribution
from kvtax.stats.least_squares import line_of_sums
from kvtax.stats.quantiles import MIN_SESSIONS, SessionDraws
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """`load[k]` (instances,) holds from `at_ns[k]` (k,) to `at_ns[k + 1]`."""

    at_ns: Ints
    load: Floats
    instances: list[str]

    @property
    def held_ns(self) -> Floats:
        """Compute how long each load held, (k,); 0 for the last one."""
        return np.diff(self.at_ns, append=self.at_ns[-1:]).astype(float)

    def mean_between(self, instance: str, start_ns: Ints, end_ns: Ints) -> Floats:
        """Mean load at `instance` over each interval (n,), intervals not empty."""
        column = self.load[:, self.instances.index(instance)]
        area = np.concatenate([[0.0], np.cumsum(column[:-1] * self.held_ns[:-1])])

        def until(at_ns: Ints) -> Floats:
            return np.asarray(np.interp(at_ns, self.at_ns, area))

        return (until(end_ns) - until(start_ns)) / (end_ns - start_ns)

    def between(self, start_ns: int, end_ns: int) -> Steps:
        """Cut to [start_ns, end_ns]."""
        inside = (self.at_ns > start_ns) & (self.at_ns < end_ns)
        first = max(int(np.searchsorted(self.at_ns, start_ns, "right")) - 1, 0)
        load = np.concatenate([self.load[first : first + 1], self.load[inside]])
        at = np.concatenate([[start_ns], self.at_ns[inside], [end_ns]])
        return Steps(at, np.concatenate([load, load[-1:]]), self.instances)


def step_function(intervals: pl.DataFrame, instances: list[str]) -> Steps | None:
    """Sum of `intervals` (start_ns, end_ns, weight, instance); None without any.

    Intervals of instances that are not named, or that have no start or end, are left
    out.
    """
    known = intervals.drop_nulls(["start_ns", "end_ns", "weight"]).filter(
        pl.col("instance").is_in(instances)
    )
    if known.is_empty():
        return None
    edges = pl.concat(
        [
            known.select("instance", at="start_ns", change=pl.col("weight")),
            known.select("instance", at="end_ns", change=-pl.col("weight")),
        ]
    ).sort("at")
    at_ns, place = np.unique(edges["at"].to_numpy(), return_inverse=True)
    column = (
        edges["instance"]
        .replace_strict({n: i for i, n in enumerate(instances)}, return_dtype=pl.Int64)
        .to_numpy()
    )
    change = np.zeros((len(at_ns), len(instances)))
    np.add.at(change, (place, column), edges["change"].to_numpy().astype(float))
    return Steps(at_ns, np.cumsum(change, axis=0), instances)


def ongoing_tokens(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals of the tokens under way: prompt and asked output, from send to end.

    Where the prompt is computed on another instance, it also weighs there until the
    first token.
    """
    tokens = pl.coalesce("usage_prompt_tokens", "input_tokens")
    serving = requests.select(
        "instance",
        start_ns="sent_ns",
        end_ns="end_ns",
        weight=tokens + pl.col("output_tokens"),
    )
    elsewhere = requests.filter(pl.col("prefill_instance").is_not_null()).select(
        instance="prefill_instance",
        start_ns="sent_ns",
        end_ns=pl.coalesce("first_token_ns", "end_ns"),
        weight=tokens,
    )
    return pl.concat([serving, elsewhere])


def pending_prefill(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals of new tokens, from send to first token, where they are computed."""
    return requests.select(
        instance=pl.coalesce("prefill_instance", "instance"),
        start_ns="sent_ns",
        end_ns=pl.coalesce("first_token_ns", "end_ns"),
        weight="new_tokens",
    )


Window = tuple[int, int] | None


class Imbalance(msgspec.Struct):
    """Prompt and generated tokens by instance; empty if instances are not known."""

    tokens: dict[str, int]
    """By instance."""
    max_over_min: float | None
    """Null if an instance served nothing."""


class Skew(msgspec.Struct):
    """Max/mean over the instances, weighted by time; 1 is even."""

    mean: float
    """Mean over time."""
    p99: float
    """99th percentile over time."""


class Held(msgspec.Struct):
    """Sessions or tokens at an instance, over time."""

    mean: float
    """Mean over time."""
    peak: int
    """Highest number."""


class Accumulation(msgspec.Struct):
    """Sessions and their context tokens at each instance."""

    sessions: dict[str, Held]
    """By instance."""
    tokens: dict[str, Held]
    """Context tokens by instance."""
    sessions_skew: Skew | None
    """Null without sessions."""
    tokens_skew: Skew | None
    """Null without tokens."""


class GpuUse(msgspec.Struct):
    """Means over the samples of one GPU, and its highest use of memory."""

    samples: int
    """Number of samples."""
    utilization_percent: float | None
    """Mean use."""
    memory_used_mib_max: float | None
    """Highest use of memory."""
    power_w: float | None
    """Mean power."""


def token_imbalance(requests: pl.DataFrame, instances: list[str]) -> Imbalance:
    """Sum up prompt and generated tokens of the requests that ended ok.

    A prompt counts where it was computed.
    """
    ok = requests.filter(pl.col("status") == "ok")
    if ok["instance"].null_count() == ok.height > 0:
        return Imbalance({}, None)
    generated = pl.col("usage_completion_tokens").fill_null(0)
    parts = pl.concat(
        [
            ok.select("instance", tokens=generated),
            ok.select(
                pl.coalesce("prefill_instance", "instance").alias("instance"),
                tokens=pl.coalesce("usage_prompt_tokens", "input_tokens").fill_null(0),
            ),
        ]
    )
    sums = dict(parts.group_by("instance").agg(pl.col("tokens").sum()).iter_rows())
    tokens = {name: int(sums.get(name, 0)) for name in instances}
    return Imbalance(tokens, max_over_min(list(tokens.values())))


def max_over_min(values: list[int]) -> float | None:
    if not values or min(values) <= 0:
        return None
    return round(max(values) / min(values), 4)


def hotspot(
    requests: pl.DataFrame, instances: list[str], window_ns: Window = None
) -> Skew | None:
    """Compute the skew of ongoing tokens over time; None without any.

    In `window_ns` where one is given: as a run begins and ends, the few requests that
    are under way cannot be even. Time in which nothing was under way does not count.
    """
    steps = step_function(ongoing_tokens(requests), instances)
    return skew(inside(steps, window_ns)) if steps else None


def inside(steps: Steps, window_ns: Window) -> Steps:
    return steps.between(*window_ns) if window_ns else steps


def skew(steps: Steps) -> Skew | None:
    """Compute max/mean over the instances, weighted by the time it held."""
    mean = steps.load.mean(axis=1)
    busy = (mean > 1e-9) & (steps.held_ns > 0)
    if not busy.any():
        return None
    ratio = steps.load[busy].max(axis=1) / mean[busy]
    held = steps.held_ns[busy]
    order = np.argsort(ratio)
    share = np.cumsum(held[order]) / held.sum()
    at = min(int(np.searchsorted(share, 0.99)), len(order) - 1)
    return Skew(
        mean=round(float(np.average(ratio, weights=held)), 4),
        p99=round(float(ratio[order][at]), 4),
    )


def residence(requests: pl.DataFrame) -> pl.DataFrame:
    """Intervals (session, instance, start_ns, end_ns, tokens) of one arm and repeat."""
    placed = requests.filter(
        pl.col("instance").is_not_null() & pl.col("sent_ns").is_not_null()
    ).sort("session", "sent_ns")
    following = pl.col("sent_ns").shift(-1).over("session")
    return placed.select(
        "session",
        "instance",
        start_ns="sent_ns",
        end_ns=pl.coalesce(following, "end_ns", "sent_ns"),
        tokens=pl.coalesce("usage_prompt_tokens", "input_tokens").fill_null(0)
        + pl.col("usage_completion_tokens").fill_null(0),
    )


def accumulation(
    requests: pl.DataFrame, instances: list[str], window_ns: Window = None
) -> Accumulation | None:
    """Describe how sessions pile up at the instances.

    In `window_ns` where one is given. None where no request was placed.
    """
    lives = residence(requests)
    counted = sessions_over_time(lives, instances)
    weighed = step_function(lives.rename({"tokens": "weight"}), instances)
    if counted is None or weighed is None:
        return None
    counted, weighed = inside(counted, window_ns), inside(weighed, window_ns)
    return Accumulation(
        sessions=_by_instance(counted),
        tokens=_by_instance(weighed),
        sessions_skew=skew(counted),
        tokens_skew=skew(weighed),
    )


def sessions_over_time(lives: pl.DataFrame, instances: list[str]) -> Steps | None:
    return step_function(lives.with_columns(weight=pl.lit(1)), instances)


def _by_instance(steps: Steps) -> dict[str, Held]:
    total = max(steps.held_ns.sum(), 1.0)
    mean = (steps.load * steps.held_ns[:, None]).sum(axis=0) / total
    return {
        name: Held(round(float(mean[column]), 2), int(steps.load[:, column].max()))
        for column, name in enumerate(steps.instances)
    }


GPU_COLUMNS = {
    "monotonic_ns": pl.Int64,
    "gpu": pl.String,
    "utilization_percent": pl.Float64,
    "memory_used_mib": pl.Float64,
    "power_w": pl.Float64,
    "sm_clock_mhz": pl.Float64,
}


def gpu_use(folder: Path, requests: pl.DataFrame) -> dict[str, GpuUse] | None:
    """Describe the use of each GPU.

    Between the first send and the last end of `requests`; None without gpu.csv or
    without a sample then. Raises RecordsError.
    """
    path = folder / "gpu.csv"
    if not path.exists():
        return None
    try:
        samples = pl.read_csv(path, schema=GPU_COLUMNS)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RecordsError(f"{path}: {error}") from None
    first, last = requests["sent_ns"].min(), requests["end_ns"].max()
    during = samples.filter(pl.col("monotonic_ns").is_between(first, last))
    table = (
        during.group_by("gpu")
        .agg(
            pl.len().alias("samples"),
            pl.col("utilization_percent").mean().round(2),
            pl.col("memory_used_mib").max().alias("memory_used_mib_max"),
            pl.col("power_w").mean().round(1),
        )
        .sort("gpu")
    )
    return {row.pop("gpu"): GpuUse(**row) for row in table.to_dicts()} or None


MIN_REQUESTS = 30
POINTS = {"session": pl.String, "tpot_ms": pl.Float64, "prefill_ktokens": pl.Float64}


class Interference(msgspec.Struct):
    """Line of TPOT over the prefill under way at the same instance."""

    slope_ms_per_ktoken: Estimate
    """TPOT added per 1,000 tokens of prefill."""
    base_ms: float
    """TPOT without any prefill."""
    n: int
    """Requests."""


def prefill_points(requests: pl.DataFrame, instances: list[str]) -> pl.DataFrame:
    """(session, prefill_ktokens, tpot_ms) of one arm and repeat."""
    steps = step_function(pending_prefill(requests), instances)
    decoded = requests.filter(
        pl.col("tpot_ms").is_not_null() & (pl.col("end_ns") > pl.col("first_token_ns"))
    )
    frames = []
    if steps is None:
        return pl.DataFrame(schema=POINTS)
    for name in instances:
        own = decoded.filter(pl.col("instance") == name)
        mean = steps.mean_between(
            name, own["first_token_ns"].to_numpy(), own["end_ns"].to_numpy()
        )
        frames.append(
            own.select("session", "tpot_ms").with_columns(
                pl.Series("prefill_ktokens", np.maximum(mean, 0) / 1e3)
            )
        )
    return pl.concat(frames) if frames else pl.DataFrame(schema=POINTS)


def interference(points: pl.DataFrame, draws: SessionDraws) -> Interference | None:
    """Fit the line; None with too few requests, or if x is constant."""
    if points.height < MIN_REQUESTS:
        return None
    x = points["prefill_ktokens"].to_numpy()
    y = points["tpot_ms"].to_numpy()
    owner = draws.index_of(points["session"])
    sessions = draws.counts.shape[1]
    # Sums of each session are all that least squares needs of it.
    sums = np.stack(
        [
            np.bincount(owner, weights=term, minlength=sessions)
            for term in (np.ones_like(x), x, y, x * x, x * y)
        ]
    )
    value, base = line_of_sums(sums.sum(axis=1))
    if not np.isfinite(value):
        return None
    drawn, _ = line_of_sums(sums @ draws.counts.T)
    if len(np.unique(owner)) < MIN_SESSIONS:
        drawn = np.full_like(drawn, np.nan)
    else:
        drawn = np.where(np.isfinite(drawn), drawn, value)
    return Interference(
        slope_ms_per_ktoken=Estimate.of(Distribution(float(value), drawn), 5),
        base_ms=round(float(base), 4),
        n=points.height,
    )
