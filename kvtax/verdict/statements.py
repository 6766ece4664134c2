# SPDX-License-Identifier: Apache-2.0
"""From the tables of holds of all configs to the statements on each.

Every statement is in vLLM's own work of the same holds. Its interval holds in 95 % of
runs over all looks, and it holds the next server's figure: how much servers of one
config differ is pooled over the configs of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import HeldLevels, Measured, NoiseFloor, Share
from kvtax.records.profile import Ladder
from kvtax.stats.distribution import Floats
from kvtax.stats.held import Fit, Others, fit, most_rise
from kvtax.stats.processes import RunSpread
from kvtax.verdict.holds import OWN, metric_holds, own_us, rare_steps
from kvtax.verdict.metrics import (
    AFTER_IDLE,
    CALLS,
    DECIDED_BY_CALLS,
    DESCRIBED,
    HIT,
    LONG_PROMPT,
    MEMORY,
    METRICS,
    PREFILL,
    PROCESSES,
    SCHEDULE,
    STEP,
    THREADS,
    TIMED,
    TPOT,
    is_part,
)
from kvtax.verdict.roles import Roles
from kvtax.verdict.verdict import (
    Judgement,
    confirmed,
    judge_events,
    judge_long_calls,
    judge_metric,
    judge_rare,
)

EVENTS = (AFTER_IDLE, HIT, LONG_PROMPT)
# Share by which a level in own work differs between days, beyond its servers: between
# five sweeps of twelve configs.
BETWEEN_DAYS = 0.01
DIGITS = 3


@dataclass(frozen=True)
class Statements:
    """Fits of a run by config and column, and the spread of what is compared.

    `level` is the level of all intervals. `spreads` are by column, of the logs of
    `stated`, each server's median in own work at the stated |cache|.
    """

    level: float
    holds: dict[str, pl.DataFrame]
    fits: dict[str, dict[str, Fit]]
    stated: dict[str, dict[str, Floats]]
    spreads: dict[str, RunSpread | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, holds: Mapping[str, pl.DataFrame], ladder: Ladder, level: float
    ) -> Statements:
        """Fit every column of every config's table of holds."""
        stated = {
            name: _stated(table, ladder.stated_level) for name, table in holds.items()
        }
        spreads = {
            column: RunSpread.of(
                np.log(values)
                for of in stated.values()
                if (values := of.get(column)) is not None and (values > 0).all()
            )
            for column in (TIMED, TPOT, SCHEDULE, STEP)
        }
        return cls(level, dict(holds), fits_of(holds), stated, spreads)

    def judgements(self, name: str, measured: Measured) -> dict[str, Judgement]:
        """Judge every metric of a config."""
        table = self.holds[name]
        judged = {
            metric: judge_metric(fitted, self.level, METRICS[metric].margin)
            for metric, fitted in self.fits[name].items()
            if metric in METRICS
        }
        for event in EVENTS:
            if (ends := _ends(table, event)) is not None:
                judged[event] = judge_events(*ends, METRICS[event].margin)
        judged |= judge_rare(rare_steps(table))
        judged |= judge_long_calls(measured.long_calls)
        return confirmed(judged, table["repeat"].n_unique())

    def held(self, name: str, judged: Mapping[str, Judgement]) -> dict[str, HeldLevels]:
        """Tabulate every fit of a config in % of own work."""
        one_percent_us = (own_us(self.holds[name]) or 0.0) / 100
        return {
            column: _held(
                fitted,
                self.level,
                judged[column].shape if column in judged else None,
                None if column == MEMORY else one_percent_us,
            )
            for column, fitted in self.fits[name].items()
        } | {
            event: _held_events(*ends, one_percent_us, self.holds[name])
            for event in EVENTS
            if (ends := _ends(self.holds[name], event)) is not None
        }

    def over(self, name: str, baselines: list[str], column: str) -> Share | None:
        """State by how much a column lies above that of equal `baselines`.

        Without two servers of some config there is no interval.
        """
        spread = self.spreads[column]
        ours = self.stated.get(name, {}).get(column)
        theirs = [self.stated.get(base, {}).get(column) for base in baselines]
        known = [values for values in theirs if values is not None]
        base = np.concatenate(known) if known else np.zeros(0)
        if ours is None or not len(ours) or not len(base):
            return None
        here, there = float(ours.mean()), float(base.mean())
        us = own_us(self.holds[name])
        if spread is None:
            return _share(here - there, None, us)
        error = spread.log_sd * np.hypot(
            here / np.sqrt(len(ours)), there / np.sqrt(len(base))
        )
        days = BETWEEN_DAYS * np.hypot(here, there)
        reach = spread.reach_of(float(np.hypot(error, days)), self.level)
        return _share(here - there, reach, us)

    def ratio(self, name: str, other: str, column: str) -> Estimate | None:
        """Return the ratio of a column to that of `other`, in own work."""
        ours, theirs = (self.stated.get(n, {}).get(column) for n in (name, other))
        if ours is None or theirs is None or not len(ours) or not len(theirs):
            return None
        if not ((ours > 0).all() and (theirs > 0).all()):
            return None
        log = float(np.log(ours).mean() - np.log(theirs).mean())
        if (spread := self.spreads[column]) is None:
            return Estimate(round(float(np.exp(log)), DIGITS))
        reach = spread.reach(len(ours), len(theirs), self.level)
        low, value, high = np.exp([log - reach, log, log + reach]).round(DIGITS)
        return Estimate(float(value), (float(low), float(high)))

    def full_adds(self, name: str) -> Share | None:
        """State what a full cache adds to the connector's calls, if it has any."""
        fits = self.fits[name]
        return self._adds(name, CALLS if CALLS in fits else TIMED)

    def tpot_full_adds(self, name: str) -> Share | None:
        """State what a full cache adds to the time per output token."""
        return self._adds(name, TPOT)

    def _adds(self, name: str, column: str) -> Share | None:
        if (fitted := self.fits[name].get(column)) is None:
            return None
        rise, error = fitted.rise(0, fitted.last)
        return _share(rise, fitted.reach(error, self.level), own_us(self.holds[name]))


def fits_of(holds: Mapping[str, pl.DataFrame]) -> dict[str, dict[str, Fit]]:
    """Fit every column of every config, with the spread that configs share."""
    fits: dict[str, dict[str, Fit]] = {name: {} for name in holds}
    columns = dict.fromkeys(
        column for table in holds.values() for column in table.columns
    )
    for column in columns:
        if not (column in DESCRIBED or column in METRICS or is_part(column)):
            continue
        if column in EVENTS:
            continue
        shares = {name: metric_holds(table, column) for name, table in holds.items()}
        known = {name: of for name, of in shares.items() if of is not None}
        days = 0.0 if column == MEMORY else BETWEEN_DAYS
        others = Others.of(known.values(), days)
        for name, of in known.items():
            if (fitted := fit(of, others)) is not None:
                fits[name][column] = fitted
    return fits


def decisive(table: pl.DataFrame, ladder: Ladder, reads_cpu: bool) -> set[str]:
    """List the metrics on which flat rests, which the run should have measured.

    `reads_cpu` is whether the run's driver read CPU times.
    """
    needed = {name for name, metric in METRICS.items() if metric.decides}
    has_calls = _has(table, CALLS) or _has(table, PREFILL)
    knows_calls = _has(table, CALLS)
    needed -= {THREADS} if not reads_cpu else set()
    needed -= set() if has_calls else {PREFILL}
    for timed, calls in DECIDED_BY_CALLS.items():
        needed.discard(timed if knows_calls else calls)
    if not ladder.many_decoders:
        needed = {name for name in needed if not METRICS[name].many}
    return needed


def reads_cpu(holds: Mapping[str, pl.DataFrame]) -> bool:
    """Return whether the driver of a run read CPU times."""
    return any(_has(table, PROCESSES) for table in holds.values())


def noise_floor(statements: Statements, roles: Roles) -> NoiseFloor:
    """State the difference of the baseline and its twin."""
    pair = (roles.baseline or "", roles.twin or "")
    if not all(name in statements.holds for name in pair):
        return NoiseFloor()
    apart = statements.over(pair[1], [pair[0]], TIMED)
    ci95 = apart.percent.ci95 if apart else None
    differs = ci95 is not None and not ci95[0] <= 0 <= ci95[1]
    return NoiseFloor(pair, apart, differs)


def _has(table: pl.DataFrame, column: str) -> bool:
    return column in table.columns and table[column].null_count() < table.height


def _stated(table: pl.DataFrame, level: int) -> dict[str, Floats]:
    """Return each server's medians at a level, in own work, by column.

    A step is own work and what scheduler and connector take; the model is left out.
    """
    columns = (TIMED, TPOT, SCHEDULE)
    stated = {
        column: _of_servers(table, column, level)
        for column in columns
        if column in table.columns
    }
    return stated | ({STEP: 1 + stated[TIMED]} if TIMED in stated else {})


def _of_servers(table: pl.DataFrame, column: str, level: int) -> Floats:
    """Return each server's median of a column at a level, in own work: (servers,)."""
    own = table.filter(
        pl.col("level") == level,
        pl.col("many") == 0,
        pl.col(column).is_finite(),
        pl.col(OWN) > 0,
    )
    share = (pl.col(column) / pl.col(OWN)).median().alias("share")
    medians = own.group_by("repeat").agg(share).sort("repeat")
    return np.asarray(medians["share"].to_numpy(), float)


def _ends(table: pl.DataFrame, event: str) -> tuple[Floats, Floats] | None:
    """Return the events at the lowest and at the highest level, in own work."""
    holds = metric_holds(table, event)
    if holds is None:
        return None
    highest = int(table["level"].to_numpy().max())
    low, high = (holds.values[holds.level == level] for level in (0, highest))
    return (low, high) if len(low) and len(high) else None


def _share(value: float, reach: float | None, us: float | None) -> Share:
    ends = None
    if reach is not None:
        ends = (100 * (value - reach), 100 * (value + reach))
    percent = Estimate.of(Estimate(100 * value, ends), DIGITS)
    return Share(percent, round(value * (us or 0.0), DIGITS))


def _held(
    fitted: Fit, level: float, shape: str | None, one_percent_us: float | None
) -> HeldLevels:
    """Tabulate the levels of a fit, and what a full cache adds."""
    scale = 100 if one_percent_us is not None else 1
    rise, error = fitted.rise(0, fitted.last)
    reach = fitted.reach(error, level)
    errors = [
        fitted.reach(fitted.contrast(row)[1], level) for row in np.eye(len(fitted.x))
    ]

    def scaled(value: float) -> float:
        return round(scale * value, DIGITS)

    return HeldLevels(
        cache_blocks=[round(1_000 * x) for x in fitted.x],
        levels=[scaled(float(value)) for value in fitted.levels],
        errors=[scaled(error) for error in errors],
        full_adds=Estimate(scaled(rise), (scaled(rise - reach), scaled(rise + reach))),
        most=scaled(most_rise(fitted, level)),
        unit=None if one_percent_us is None else round(one_percent_us, DIGITS),
        drift_per_pass=scaled(fitted.drift),
        age=None if fitted.age is None else scaled(fitted.age),
        shape=shape,
    )


def _held_events(
    low: Floats, high: Floats, one_percent_us: float, table: pl.DataFrame
) -> HeldLevels:
    """Tabulate events at both ends; intervals reach from the least to the most."""
    blocks = table.group_by("level").agg(pl.col("cache_blocks").mean()).sort("level")
    at = blocks["cache_blocks"].to_numpy()
    ends = [float(np.median(values)) for values in (low, high)]
    reaches = [float(np.ptp(values)) / 2 for values in (low, high)]
    least, most = float(high.min() - low.max()), float(high.max() - low.min())
    rise = ends[1] - ends[0]
    return HeldLevels(
        cache_blocks=[round(float(at[0])), round(float(at[-1]))],
        levels=[round(100 * end, DIGITS) for end in ends],
        errors=[round(100 * reach, DIGITS) for reach in reaches],
        full_adds=Estimate(
            round(100 * rise, DIGITS),
            (round(100 * least, DIGITS), round(100 * most, DIGITS)),
        ),
        most=round(100 * most, DIGITS),
        unit=round(one_percent_us, DIGITS),
        drift_per_pass=0.0,
        age=None,
        shape=None,
    )
