# SPDX-License-Identifier: Apache-2.0
"""Levels of an axis that was held: what grows is seen, named, and as wide as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from benchmarks.coverage import FALSE, HEAD, Sweep, count, row
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.per_config import Evidence
from kvtax.stats.distribution import Floats
from kvtax.stats.held import (
    Fit,
    Holds,
    Others,
    falls,
    fit,
    growth,
    most_rise,
    share_between_servers,
)

SHARES = np.array([0.0, 0.3, 0.6, 0.92, 1.0])
BLOCKS_1K, PASSES, PASS_S = 18.0, 6, 40.0
MARGIN_US = 2 * BLOCKS_1K
RUNS = 400


Noises = Callable[[np.random.Generator, int], Floats]


def normal(rng: np.random.Generator, count: int) -> Floats:
    return rng.standard_normal(count)


def heavy_tails(rng: np.random.Generator, count: int) -> Floats:
    return rng.standard_t(5, count) / np.sqrt(5 / 3)


def autocorrelated(rng: np.random.Generator, count: int) -> Floats:
    """AR(1) of 0.7 over the holds."""
    values = rng.standard_normal(count)
    for hold in range(1, count):
        values[hold] = 0.7 * values[hold - 1] + np.sqrt(0.51) * values[hold]
    return values


def disturbed(rng: np.random.Generator, count: int) -> Floats:
    """Thrice the noise in three holds of ten."""
    size = np.where(rng.random(count) < 0.3, 3.0, 1.0)
    return size * rng.standard_normal(count) / np.sqrt(0.7 + 0.3 * 9)


def made_up(
    rng: np.random.Generator,
    level_us=SHARES * 0,
    sd_us: float = 5.0,
    servers: int = 1,
    passes: int = PASSES,
    drift_us: float = 0.0,
    offsets_us: float = 0.0,
    aging_us: float = 0.0,
    noise: Noises | None = None,
) -> Holds:
    """Holds of servers whose levels are `level_us`, in random order in each pass.

    The time rises by `drift_us` in each pass and by `aging_us` per second since the
    reset before a lower level; servers are `offsets_us` apart. `noise` has a variance
    of 1.
    """
    levels, count = len(SHARES), servers * passes * len(SHARES)
    server = np.repeat(np.arange(servers), passes * levels)
    number = np.tile(np.repeat(np.arange(passes), levels), servers)
    level = np.concatenate([rng.permutation(levels) for _ in range(servers * passes)])
    at = number + np.tile(np.arange(levels), servers * passes) / levels
    age_s = np.zeros(count)
    for hold in range(1, count):
        older = level[hold] > level[hold - 1] and server[hold] == server[hold - 1]
        age_s[hold] = age_s[hold - 1] + 1.0 if older else 0.0
    values = 200 + np.asarray(level_us)[level] + offsets_us * server
    # Levels are those at the mean age.
    values = values + drift_us * at + aging_us * (age_s - age_s.mean())
    return Holds(
        server=server,
        level=level,
        x=BLOCKS_1K * SHARES[level],
        time_s=1_000 + PASS_S * at,
        age_s=age_s,
        values=values + sd_us * (noise or normal)(rng, count),
    )


def of_some(holds: Holds, kept) -> Holds:
    """Return the holds that are kept."""
    return Holds(**{name: of[kept] for name, of in vars(holds).items()})


MACHINES = {
    "steady": {},
    "with heavy tails": {"noise": heavy_tails},
    "with a memory": {"noise": autocorrelated},
    "with disturbed holds": {"noise": disturbed},
    "slower from pass to pass": {"drift_us": 60.0},
    "slower with the age of the cache": {"aging_us": 40.0},
    "three servers": {"servers": 3, "passes": 2, "offsets_us": 300.0},
    "all at once": {
        "servers": 2,
        "drift_us": -30.0,
        "aging_us": 20.0,
        "offsets_us": 90.0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("slope", [0.0, 3.0])
def test_the_slope_is_unbiased_and_its_interval_holds_it_as_often_as_it_says(
    machine: str, slope: float
):
    rng, held, slopes, errors = np.random.default_rng(1), 0, [], []
    for _ in range(RUNS):
        level_us = slope * BLOCKS_1K * SHARES
        fitted = fit(made_up(rng, level_us, **MACHINES[machine]))
        value, error = fitted.slope()
        held += abs(value - slope) <= fitted.reach(error)
        slopes.append(value)
        errors.append(error)
    assert np.mean(slopes) == pytest.approx(slope, abs=4 * np.std(slopes) / RUNS**0.5)
    # The drift takes a part of what neighbouring holds have in common.
    assert 0.8 < np.std(slopes) / np.sqrt(np.mean(np.square(errors))) < 1.1
    assert 0.92 <= held / RUNS <= 0.98


def test_a_drift_is_stated_per_pass_and_not_taken_for_growth():
    rng = np.random.default_rng(2)
    fitted = fit(made_up(rng, drift_us=60.0, servers=2, offsets_us=500.0))
    assert fitted.drift == pytest.approx(60, abs=4 * fitted.drift_error)
    assert fitted.drift_error < 3
    assert growth(fitted, MARGIN_US, 0.95) is None
    assert most_rise(fitted, 0.95) < MARGIN_US


def test_what_rises_with_the_time_since_a_reset_is_not_taken_for_growth():
    rng = np.random.default_rng(3)
    holds = made_up(rng, aging_us=100.0, servers=2)
    fitted = fit(holds)
    oldest_us = 100 * holds.age_s.max()
    assert fitted.age == pytest.approx(oldest_us, abs=4 * fitted.age_error)
    least, most = fitted.age_interval(0.95)
    assert least < oldest_us < most
    assert growth(fitted, MARGIN_US, 0.95) is None
    assert most_rise(fitted, 0.95) < MARGIN_US
    # A level that is always as old tells nothing of age, and all of it looks alike.
    climbing = replace(holds, age_s=1.0 * holds.level)
    assert fit(climbing).age is None
    assert growth(fit(climbing), MARGIN_US, 0.95) is not None


def test_an_age_that_does_not_matter_is_not_in_the_fit_and_growth_must_hold_with_it():
    rng = np.random.default_rng(3)
    fitted = fit(made_up(rng, servers=2))
    assert fitted.aged is not None and fitted.df == fitted.aged.df + 1
    assert fitted.rise(0, 4)[1] < fitted.aged.rise(0, 4)[1]
    assert fitted.age == pytest.approx(0, abs=4 * fitted.age_error)
    certain = replace(known_to_1_us(0, 0, 0, 0, 90), aged=known_to_1_us(0, 0, 0, 0, 9))
    assert growth(certain, 10.0, 0.95) is None
    both = replace(certain, aged=known_to_1_us(0, 0, 0, 0, 20))
    assert growth(both, 10.0, 0.95) == "only when full"
    # One that matters is.
    assert fit(made_up(rng, aging_us=100.0)).aged is None


def test_levels_are_means_over_the_servers_whatever_these_differ_by():
    rng = np.random.default_rng(4)
    level_us = 20 * BLOCKS_1K * SHARES
    fitted = fit(made_up(rng, level_us, servers=3, offsets_us=200.0))
    assert fitted.levels == pytest.approx(400 + level_us, abs=8)
    # A server that lost its lowest levels does not tilt the others.
    holds = made_up(rng, level_us, servers=3, offsets_us=1_000.0)
    kept = (holds.server < 2) | (holds.level > 2)
    assert fit(of_some(holds, kept)).slope()[0] == pytest.approx(20, abs=0.5)


SHAPES = {
    "linear": 300 * SHARES,
    "step": np.array([0, 0, 300, 300, 300]),
    "only when full": np.array([0, 0, 0, 0, 300]),
    "saturating": np.array([0, 300, 300, 300, 300]),
    "curved": 600 * SHARES**3,
    "not monotone": np.array([0, 150, 300, 60, 0]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_growth_of_every_shape_is_seen_and_named(shape: str):
    rng, named = np.random.default_rng(5), []
    for _ in range(60):
        named.append(growth(fit(made_up(rng, SHAPES[shape])), MARGIN_US, 0.95))
    assert named.count(shape) >= 57, named


def test_what_falls_does_not_grow_and_is_called_falling():
    fitted = fit(made_up(np.random.default_rng(7), -300 * SHARES))
    assert growth(fitted, MARGIN_US, 0.95) is None
    assert falls(fitted, MARGIN_US, 0.95)
    assert not falls(fit(made_up(np.random.default_rng(7))), MARGIN_US, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sd_us", [5.0, 40.0])
def test_no_pair_of_levels_that_rises_by_two_margins_is_ever_called_flat(
    shape: str, sd_us: float
):
    rng, flat = np.random.default_rng(8), 0
    level_us = SHAPES[shape] * (2 * MARGIN_US / SHAPES[shape].max())
    for _ in range(RUNS // 4):
        flat += most_rise(fit(made_up(rng, level_us, sd_us)), 0.95) < MARGIN_US
    assert flat == 0


@pytest.mark.slow
def test_a_rise_of_the_margin_is_called_flat_in_at_most_a_twentieth_of_runs():
    rng, flat = np.random.default_rng(9), 0
    # The worst case: one pair alone.
    level_us = np.array([0, 0, 0, 0, MARGIN_US])
    for _ in range(RUNS):
        flat += most_rise(fit(made_up(rng, level_us)), 0.95) < MARGIN_US
    assert flat / RUNS < 0.07


@pytest.mark.slow
def test_nothing_is_said_to_grow_by_chance_though_every_pair_is_tested():
    rng = np.random.default_rng(10)
    machines = list(MACHINES.values())
    grown = [
        growth(fit(made_up(rng, sd_us=40.0, **machines[n % len(machines)])), 0.0, 0.95)
        for n in range(RUNS)
    ]
    assert sum(fitted is not None for fitted in grown) / RUNS < 0.07


def test_a_single_pass_cannot_tell_a_level_from_the_time():
    rng = np.random.default_rng(11)
    assert fit(made_up(rng, passes=1)) is None
    assert fit(made_up(rng, passes=2)) is not None
    # Another order of another server can.
    assert fit(made_up(rng, servers=3, passes=1)) is not None


def test_one_level_or_levels_that_do_not_rise_are_nothing_to_fit():
    holds = made_up(np.random.default_rng(12))
    assert fit(of_some(holds, holds.level == 0)) is None
    assert fit(replace(holds, x=np.full(len(holds.x), 9.0))) is None


def test_holds_that_are_alike_to_the_last_bit_still_have_an_interval():
    fitted = fit(made_up(np.random.default_rng(13), sd_us=0.0))
    assert most_rise(fitted, 0.95) == pytest.approx(0, abs=0.01)
    assert growth(fitted, MARGIN_US, 0.95) is None
    assert not fitted.is_bent()


# Levels 0 to 4 at x = 0 to 4, each known to 1 us with 1,000 degrees of freedom. The
# error of a pair is 1.4142 us, that of the line from end to end 4 / sqrt(10) = 1.2649.
def known_to_1_us(*level_us: float, df: int = 1_000) -> Fit:
    levels = np.array(level_us, float)
    x = np.arange(len(levels), dtype=float)
    return Fit(x, levels, np.eye(len(levels)), 0.0, 1.0, df, None, 0.0)


@pytest.mark.parametrize(
    ("level_us", "grows"),
    [
        # 10 pairs and a line at once: t at 1 - 0.025 / 11 is 2.843, or 4.02 us a pair.
        ((0, 0, 0, 0, 13.95), False),
        ((0, 0, 0, 0, 14.10), True),
        ((0, 14.10, 0, 0, 0), True),
        # The line is known better than its ends: 3.596 us.
        ((0, 3.38, 6.76, 10.14, 13.52), False),
        ((0, 3.42, 6.84, 10.26, 13.68), True),
        ((14.10, 0, 0, 0, 0), False),
    ],
)
def test_a_rise_above_the_margin_is_tested_for_all_pairs_at_once(level_us, grows):
    assert (growth(known_to_1_us(*level_us), 10.0, 0.95) is not None) == grows


@pytest.mark.parametrize(
    ("level_us", "level", "falling"),
    [
        # 10 pairs: t at 1 - 0.025 / 10 is 2.813, or 3.98 us.
        ((13.90, 0, 0, 0, 0), 0.95, False),
        ((14.05, 0, 0, 0, 0), 0.95, True),
        ((0, 0, 14.05, 0, 0), 0.95, True),
        # More looks ask for more.
        ((14.05, 0, 0, 0, 0), 0.99, False),
        ((0, 0, 0, 0, 14.05), 0.95, False),
    ],
)
def test_a_fall_below_the_margin_is_tested_for_all_pairs_at_once(
    level_us, level, falling
):
    assert falls(known_to_1_us(*level_us), 10.0, level) == falling


@pytest.mark.parametrize(
    ("level_us", "df", "level", "most_us"),
    [
        # One-sided: t is 1.6464, and 1.4142 times that is 2.328.
        ((0, 0, 0, 0, 0), 1_000, 0.95, 2.328),
        ((0, 7, 0, 0, 5), 1_000, 0.95, 9.328),
        ((9, 7, 5, 3, 1), 1_000, 0.95, 0.328),
        ((0, 0), 4, 0.95, 1.4142 * 2.1318),
        ((0, 0), 4, 0.99, 1.4142 * 3.7469),
    ],
)
def test_the_most_that_a_level_may_lie_above_a_lower_one(level_us, df, level, most_us):
    fitted = known_to_1_us(*level_us, df=df)
    assert most_rise(fitted, level) == pytest.approx(most_us, abs=2e-3)


@pytest.mark.parametrize(
    ("kink_us", "bent"),
    # A kink in the middle leaves 0.8 of its square: F at 99 % of 3 and 1,000 is 3.80.
    [(3.70, False), (3.85, True), (-3.70, False), (-3.85, True)],
)
def test_a_line_is_bent_if_it_would_be_so_once_in_a_hundred_by_chance(kink_us, bent):
    assert known_to_1_us(0, 10, 20 + kink_us, 30, 40).is_bent() == bent


@pytest.mark.parametrize(
    ("level_us", "shape"),
    [
        ((0, 25_000, 50_000, 75_000, 100_000), "linear"),
        ((0, 0, 0, 9_900, 100_000), "only when full"),
        # A second rise of more than a tenth.
        ((0, 0, 0, 10_100, 100_000), "curved"),
        # No jump is more than seven tenths of the rise.
        ((0, 9_990, 19_980, 30_100, 100_000), "curved"),
        ((0, 9_800, 19_600, 29_400, 100_000), "only when full"),
        ((0, 9_000, 18_000, 27_000, 36_000, 100_000), "curved"),
        # Rises are known to 3.5 us: only 14 are certainly more than a tenth.
        ((0, 0, 0, 12, 100), "only when full"),
        ((0, 0, 0, 14, 100), "curved"),
        ((0, 100_000, 100_000, 109_900, 100_000), "not monotone"),
        ((0, 100_000, 100_000, 100_000, 100_000), "saturating"),
        ((0, 0, 100_000, 100_000, 100_000), "step"),
        ((0, 0, 0, 100_000, 100_000), "step"),
        ((0, 100_000, 99_000, 99_000, 60_000), "not monotone"),
    ],
)
def test_a_shape_is_named_by_its_jumps(level_us, shape):
    assert growth(known_to_1_us(*level_us), 1.0, 0.95) == shape


def table(values, server, level, time_s, age_s) -> Holds:
    """Holds from columns of equal length."""
    floats = (np.asarray(column, float) for column in (level, time_s, age_s, values))
    return Holds(server, level, *floats)


SERVER = np.repeat([0, 1], 12)
NUMBER = np.tile(np.repeat([0, 1, 2, 3], 3), 2)
LEVEL = np.tile([0, 1, 2, 2, 0, 1, 0, 2, 1, 1, 2, 0], 2)
AGE_S = np.tile([0, 1, 2, 2, 0, 1, 0, 1, 0, 0, 1, 0], 2)
# Each of 12 holds takes 10 s, then there is a pause; the second server begins later.
TIME_S = 1_000 * SERVER + 40 * NUMBER + 10 * np.tile([0, 1, 2], 8)
# From the first hold to the last, and one more.
PASS_OF_TABLE_S = 140 * 12 / 11 / 4


def test_what_a_time_is_made_of_is_found_exactly_where_there_is_no_noise():
    """100, 130 and 200 us; 6 us more a pass; 5 us a second; servers 8 us apart."""
    values = np.array([100.0, 130.0, 200.0])[LEVEL]
    since = TIME_S - np.where(SERVER == 0, TIME_S[:12].mean(), TIME_S[12:].mean())
    values = values + 6 * since / PASS_OF_TABLE_S + np.where(SERVER == 0, 8.0, -8.0)
    values = values + 5.0 * (AGE_S - AGE_S.mean())
    fitted = fit(table(values, SERVER, LEVEL, TIME_S, AGE_S))
    assert fitted.levels == pytest.approx([100, 130, 200], rel=1e-5)
    assert fitted.drift == pytest.approx(6.0, rel=1e-4)
    # The oldest hold is of 2 s.
    assert fitted.age == pytest.approx(10.0, rel=1e-4)
    assert fitted.x.tolist() == [0.0, 1.0, 2.0]
    # 24 holds less 3 levels, 2 drifts, 1 offset and 1 age.
    assert fitted.df == 17
    assert fitted.slope()[0] == pytest.approx(50.0, rel=1e-4)
    assert fitted.rise(0, 2)[0] == pytest.approx(100.0, rel=1e-4)
    assert fitted.rise(2, 1)[0] == pytest.approx(-70.0, rel=1e-4)


@pytest.mark.parametrize("least_us", [50.0, 1.0])
def test_levels_and_their_errors_are_those_of_weighted_least_squares(least_us):
    """By the normal equations, weighted by the levels' sizes.

    A level's size is at least a tenth of the mean level's.
    """
    rng = np.random.default_rng(15)
    values = np.array([least_us, 100.0, 400.0])[LEVEL]
    values = values * (1 + 0.02 * rng.normal(size=24))
    # All are as old: there is no age to fit.
    fitted = fit(table(values, SERVER, LEVEL, TIME_S, 0.0 * AGE_S))
    columns = [LEVEL == 0, LEVEL == 1, LEVEL == 2]
    for server in (0, 1):
        own = server == SERVER
        since = (TIME_S - TIME_S[own].mean()) / PASS_OF_TABLE_S
        columns.append(np.where(own, since, 0.0))
    design = np.column_stack([*columns, np.where(SERVER == 1, 1.0, -1.0)]).astype(float)
    size = np.maximum(fitted.levels, 0.1 * fitted.levels.mean())
    scaled, target = design / size[LEVEL][:, None], values / size[LEVEL]
    normal = scaled.T @ scaled
    factors = np.linalg.solve(normal, scaled.T @ target)
    left = target - scaled @ factors
    covariance = float(left @ left) / (24 - 6) * np.linalg.inv(normal)
    assert fitted.levels == pytest.approx(factors[:3], rel=1e-3)
    assert fitted.covariance == pytest.approx(covariance[:3, :3], rel=0.02)
    assert fitted.drift == pytest.approx(factors[3:5].mean(), rel=1e-3, abs=1e-3)
    drifts = covariance[3:5, 3:5]
    assert fitted.drift_error == pytest.approx(drifts.sum() ** 0.5 / 2, rel=0.01)


def short(level: list[int], x: list[int] | None = None) -> Holds:
    """Holds of one server, a pass of two takes 10 s."""
    time_s = [10 * (n // 2) + n % 2 for n in range(len(level))]
    holds = table(
        level, np.zeros(len(level), int), np.array(level), time_s, [0] * len(level)
    )
    return holds if x is None else replace(holds, x=np.array(x, float))


@pytest.mark.parametrize(
    ("holds", "df"),
    [
        # 2 levels and a drift.
        (short([0, 1] * 3), 3),
        # Too few to know the drift as well as the noise: 2 levels.
        (short([0, 1, 0, 1]), 2),
        (short([0, 1, 0]), 1),
        # Time explains the levels as well; a level alone; x falls or stands still.
        (short([0, 1]), None),
        (short([1] * 6), None),
        (short([0, 1] * 3, x=[2, 1] * 3), None),
        (short([0, 1] * 3, x=[2, 2] * 3), None),
    ],
)
def test_degrees_of_freedom_are_holds_less_unknowns(holds, df):
    fitted = fit(holds)
    assert (None if fitted is None else fitted.df) == df


def test_an_interval_of_the_drift_holds_as_often_as_it_is_asked_to():
    fitted = replace(known_to_1_us(0, 0), drift=10.0, drift_error=2.0, df=4)
    assert fitted.drift_interval(0.95) == pytest.approx(
        (10 - 5.553, 10 + 5.553), abs=1e-3
    )
    assert fitted.drift_interval(0.99) == pytest.approx(
        (10 - 9.208, 10 + 9.208), abs=1e-3
    )


# Real noise: of the committed sweep.
@pytest.fixture(scope="module")
def real() -> Sweep:
    return Sweep.of(read_document(REPOSITORY / "evidence.json.gz", Evidence))


@pytest.mark.slow
def test_on_real_noise_intervals_hold_the_truth_and_words_are_seldom_false(real: Sweep):
    counts = count([real], 2, 2)
    assert {"timed", "timed_many", "prefill", "threads", "processes"} <= counts.keys()
    for name, of_metric in counts.items():
        # 88 fits are as far off as 5 points.
        assert min(of_metric.true) > 0.88, name
        shares = dict(zip(FALSE, of_metric.false, strict=True))
        assert max(of_metric.false) < 0.15, (name, shares)
        assert len(row(name, of_metric)) == len(HEAD)


@pytest.mark.slow
def test_a_draw_keeps_the_holds_of_real_servers_and_deals_whole_passes(real: Sweep):
    drawn = real.draw("noop", 2, np.random.default_rng(3))
    own = pl.concat(real.servers["noop"])
    assert sorted(drawn["step"].drop_nulls()) == sorted(own["step"].drop_nulls())
    passes = [tuple(one_pass["level"]) for one_pass in real.passes]
    dealt = [tuple(one_pass["level"]) for one_pass in drawn.iter_slices(len(passes[0]))]
    assert set(dealt) <= set(passes) and len(set(dealt)) > 2
    assert (drawn["many"] == own["many"]).all()


def uneven(rng: np.random.Generator, share: float, servers: int = 3) -> Holds:
    """Make servers of which each has its levels off by `share` of them."""
    holds = made_up(rng, sd_us=2.0, servers=servers, passes=4)
    off = rng.standard_normal((servers, len(SHARES)))
    values = holds.values * (1 + share * off[holds.server, holds.level])
    return replace(holds, values=values)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_share_between_servers_is_found_from_several_configs(share):
    rng = np.random.default_rng(5)
    shares = [
        share_between_servers([uneven(rng, share) for _ in range(8)]) for _ in range(20)
    ]
    assert np.mean(shares) == pytest.approx(share, abs=0.02)
    assert share_between_servers([uneven(rng, share, servers=1)]) == 0.0


@pytest.mark.slow
def test_an_interval_holds_the_next_servers_figure_where_servers_differ():
    rng, narrow, wide = np.random.default_rng(6), [], []
    for _ in range(300):
        holds = uneven(rng, 0.1)
        for reaches, between in ((narrow, 0.0), (wide, 0.1)):
            fitted = fit(holds, Others(between))
            rise, error = fitted.rise(0, fitted.last)
            reaches.append(abs(rise) <= fitted.reach(error))
    assert np.mean(wide) > 0.93 > np.mean(narrow) + 0.1
