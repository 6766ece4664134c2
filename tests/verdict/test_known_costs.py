# SPDX-License-Identifier: Apache-2.0
"""Costs of known kind in recorded steps, and what the statements say of them.

Two servers go three times over the levels of a cache of 18,000 blocks. A step takes
2,000 us of sleep, 650 us of vLLM's own work, 110 us of scheduler and 20 us of connector
on a machine that changes its speed from hold to hold; a hundredth of the steps is held
up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from kvtax.records.per_config import Judged
from kvtax.records.profile import Ladder
from kvtax.records.requests import DECODERS, Phase, RequestRecord, Requests
from kvtax.records.run import Role, RunRecord
from kvtax.stats.distribution import Floats
from kvtax.steps.trial_steps import NO_READINGS, READING_SCHEMA
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import LoadedTrial
from tests.harness.made_up import profile

pytestmark = pytest.mark.slow

BLOCKS = 18_000
LADDER = Ladder([0.0, 0.3, 0.6, 0.92, 1.0], 3, 8, 56, 3, 24.0, many_decoders=32)
SLEEP_US, OWN_US, SCHEDULER_US, CONNECTOR_US = 2_000.0, 650.0, 110.0, 20.0
STEPS_OF_HOLD = 56
# Every 20th step of a hold has a prefill, and as many requests end.
PREFILL_EVERY = 20


@dataclass
class Steps:
    """All steps of a server, each an element of arrays."""

    phase: Floats
    hold: Floats
    level: Floats
    decoders: Floats
    blocks: Floats
    prefill_tokens: Floats
    idle: Floats
    """1 in the first step after a second of idleness."""
    number: Floats

    @property
    def share(self) -> Floats:
        """Return the share of the cache that is full."""
        return self.blocks / BLOCKS

    @property
    def after_prefill(self) -> Floats:
        """Return 1 in the step after one with a prefill."""
        return np.r_[0.0, (self.prefill_tokens[:-1] > 0) * 1.0]


Cost = Callable[[Steps], Floats]


def plan(rng: np.random.Generator) -> Steps:
    """Lay out the steps of a server: fills, holds and what follows them."""
    rows: list[tuple[float, ...]] = []
    number, blocks = 0, 0.0
    for _ in range(LADDER.passes):
        order = [(level, 8) for level in rng.permutation(5).tolist()]
        order += [(level, 32) for level in rng.permutation([0, 3]).tolist()]
        for level, decoders in order:
            target = LADDER.levels[level] * BLOCKS
            if target < blocks:
                blocks = 0.0
            while blocks < target - 1:
                blocks = min(blocks + 500, target)
                rows.append((Phase.FILL, number, level, decoders, blocks, 8_000, 0, 1))
            for step in range(STEPS_OF_HOLD):
                tokens = 12 if step % PREFILL_EVERY == PREFILL_EVERY - 1 else 0
                rows.append(
                    (Phase.HOLD, number, level, decoders, blocks, tokens, 0, decoders)
                )
            if decoders == 8 and level in (0, 4):
                for phase, tokens in (
                    (Phase.AFTER_IDLE, 12),
                    (Phase.HIT, 16),
                    (Phase.LONG, 4_096),
                ):
                    idle = phase is Phase.AFTER_IDLE
                    rows.append((phase, number, level, 8, blocks, tokens, idle, 1))
            number += 1
    phase, hold, level, decoders, cached, tokens, idle, _ = np.array(rows, float).T
    count = np.arange(len(rows), dtype=float)
    return Steps(phase, hold, level, decoders, cached, tokens, idle, count)


def nothing(steps: Steps) -> Floats:
    return 0 * steps.share


def server(
    repeat: int, cost: Cost, hidden: Cost, tokens_pay: float, leak_mib: float
) -> LoadedTrial:
    """Make a server in whose steps the connector pays `cost`.

    vLLM's own work takes `hidden` us more, clients pay `tokens_pay` us a token beside
    the steps, and `leak_mib` stay allocated after each pass.
    """
    rng = np.random.default_rng(50 + repeat)
    steps = plan(rng)
    count = len(steps.number)
    paid = np.asarray(cost(steps), float) * np.ones(count)
    # Neighbours slow all work of a hold alike.
    of_hold = 1 + 0.15 * rng.random(int(steps.hold.max()) + 1)
    slow = of_hold[steps.hold.astype(int)]
    stalls = np.where(rng.random(count) < 0.01, rng.uniform(200, 3_000, count), 0.0)
    noise = 1 + 0.04 * rng.standard_normal((3, count))
    big = np.where(steps.decoders == 32, 2.0, 1.0)
    connector = slow * (CONNECTOR_US * noise[0] + paid)
    overhead = slow * big * SCHEDULER_US * noise[1] + connector + stalls
    own = slow * (big * OWN_US * noise[2] + hidden(steps))
    slept = SLEEP_US + rng.exponential(60, count)
    step_us = overhead + own + slept
    table = pl.DataFrame(
        {
            "repeat": np.full(count, repeat),
            "t_ns": (1e9 + np.cumsum(step_us) * 1e3).astype(np.int64),
            "step_id": steps.number.astype(int),
            "phase": steps.phase.astype(int),
            "hold": steps.hold.astype(int),
            "level": steps.level.astype(int),
            "decoders": steps.decoders.astype(int),
            "age_s": rng.uniform(0, 5, count),
            "batch": np.where(steps.phase == Phase.HOLD, steps.decoders, 1).astype(int),
            "cache_blocks": steps.blocks.astype(int),
            "decode_only": steps.prefill_tokens == 0,
            "prefills": steps.prefill_tokens > 0,
            "connector_us": connector,
            "overhead_us": overhead,
            "schedule_us": overhead - connector,
            "step_us": step_us,
            "forward_us": slept,
            "schedule_cpu_us": SCHEDULER_US,
            "thread_cpu_us": overhead + own,
            **dict.fromkeys(OTHER_TIMES, 1.0),
        }
    ).cast({name: READING_SCHEMA[name] for name in ("repeat", *PLACE)})
    return LoadedTrial(
        config="mine",
        repeat=repeat,
        error=None,
        facts=None,
        steps=table,
        readings=_readings(table, leak_mib),
        requests=_requests(table, tokens_pay),
    )


PLACE = ("hold", "level", "decoders")
OTHER_TIMES = ("build_meta_us", "update_us", "execute_model_us", "bind_us")
OTHER_TIMES += ("start_load_kv_us", "wait_for_save_us", "get_finished_us")


def _readings(table: pl.DataFrame, leak_mib: float) -> pl.DataFrame:
    held = table.filter(pl.col("phase") == Phase.HOLD)
    us = held.group_by("repeat", *PLACE).agg(
        (pl.col("step_us") - pl.col("forward_us")).mean().alias("engine")
    )
    readings = us.with_columns(
        processes=pl.col("engine") + 700.0,
        waited=pl.lit(5.0),
        memory=640.0 + leak_mib * (pl.col("hold") / 7).cast(pl.Float64),
    )
    return pl.concat([NO_READINGS, readings.select(NO_READINGS.columns)])


def _requests(table: pl.DataFrame, tokens_pay: float) -> Requests:
    held = table.filter(pl.col("phase") == Phase.HOLD)
    records = []
    for (number, level, decoders), own in held.group_by(PLACE, maintain_order=True):
        us = own["step_us"].to_numpy()
        tpot_us = float(np.mean(us - own["forward_us"].to_numpy())) + SLEEP_US
        for _ in range(3):
            records.append(
                RequestRecord(
                    id=len(records),
                    phase=f"{Phase.FILL.at(number, level, decoders)}{DECODERS}",
                    status="ok",
                    prompt_tokens=16,
                    output_tokens=11,
                    first_token_ns=0,
                    end_ns=round(1e4 * (tpot_us + tokens_pay)),
                )
            )
    return Requests(len(records), [], [], records, None, 0)


def judged(
    cost: Cost = nothing,
    hidden: Cost = nothing,
    tokens_pay: float = 0.0,
    leak_mib: float = 0.0,
) -> Judged:
    """Judge a config with the cost beside a baseline without it."""
    mine = [server(repeat, cost, hidden, tokens_pay, leak_mib) for repeat in range(2)]
    plain = [server(repeat + 5, nothing, nothing, 0.0, 0.0) for repeat in range(2)]
    for trial in plain:
        object.__setattr__(trial, "config", "plain")
    run = RunRecord(
        profile=profile(LADDER, forward_us=int(SLEEP_US)),
        configs={"plain": Role(role="baseline")},
    )
    return analyse(run, [*plain, *mine], None).document.configs["mine"]


def every(nth: int) -> Cost:
    return lambda steps: (steps.number % nth == 0) * 1.0


def passed_quarters(steps: Steps) -> Floats:
    """Return 1 in each step in which a quarter of the cache is passed."""
    quarter = np.floor(4 * steps.share + 1e-9)
    return np.r_[0.0, np.diff(quarter) > 0] * (steps.share < 1)


GROWS: dict[str, Cost] = {
    "every 11th step": lambda s: every(11)(s) * 900 * s.share,
    "every 11th step, when full": lambda s: every(11)(s) * 950 * (s.share > 0.95),
    "the step after a prefill": lambda s: 540 * s.share * s.after_prefill * 2,
    "the first step after idleness": lambda s: 36_000 * s.share * s.idle,
    "a prefix hit": lambda s: 5_400 * s.share * (s.phase == Phase.HIT),
    "an evicted block": lambda s: (
        20 * s.prefill_tokens / 16 * (s.phase == Phase.LONG) * (s.share > 0.99)
    ),
    "a finished request": lambda s: 1_200 * 18 * s.share * every(20)(s),
    "a large batch": lambda s: 20 * 18 * s.share * (s.decoders > 8),
    "each step": lambda s: 4 * 18 * s.share,
    "log": lambda s: 12 * np.log2(1 + s.blocks),
}


@pytest.mark.parametrize("kind", GROWS)
def test_a_cost_that_grows_is_called_so_wherever_it_is_paid(kind):
    assert judged(GROWS[kind]).verdict == "grows"


def test_a_cost_in_few_steps_is_in_the_figure_of_its_row_too():
    entry = judged(GROWS["every 11th step"])
    assert entry.full_adds.percent.low > 0
    # 900 us in each 11th step of some 650 us of own work.
    assert entry.full_adds.percent.value == pytest.approx(100 * 82 / 650, rel=0.15)


@pytest.mark.parametrize(
    ("kind", "cost", "shape"),
    [
        ("nothing", nothing, None),
        ("the same at all levels", lambda s: 300.0, None),
        ("below a quarter", lambda s: 2_000 * (s.share < 0.25), "falls"),
        ("within the margin", lambda s: 9 * s.share, None),
    ],
)
def test_a_cost_that_does_not_grow_is_flat_and_a_fall_is_said(kind, cost, shape):
    entry = judged(cost)
    assert entry.verdict == "flat", kind
    assert entry.held["calls"].shape == shape


def test_long_calls_are_told_whatever_the_level():
    entry = judged(lambda s: 300_000 * passed_quarters(s))
    assert entry.verdict == "stalls"
    assert entry.long_calls.count >= 6
    assert entry.long_calls.longest_ms > 290
    rare = judged(lambda s: 50_000 * every(500)(s) * (s.share > 0.5))
    assert rare.verdict in ("stalls", "grows") and rare.long_calls.count >= 2
    assert judged().long_calls.count == 0


def test_memory_that_is_never_given_back_is_told_by_the_pass():
    entry = judged(leak_mib=216.0)
    assert entry.verdict == "drifts"
    assert entry.verdict_of["memory"] == "drifts"
    assert entry.held["memory"].drift_per_pass == pytest.approx(216, rel=0.2)


def test_a_cost_beside_the_engine_is_in_the_tokens_that_users_get():
    entry = judged(tokens_pay=100.0)
    assert entry.verdict == "flat"
    over = entry.tpot_over_baseline.percent
    assert over.low > 0
    assert over.value == pytest.approx(100 * 100 / 700, rel=0.3)
    low, high = entry.over_baseline.percent.ci95
    assert low < 0 < high


def test_a_full_cache_is_stated_in_a_users_token():
    entry = judged(GROWS["a finished request"])
    assert entry.verdict_of["tpot"] == "grows"
    assert entry.tpot_full_adds.percent.low > 0


def test_a_thread_that_slows_own_work_down_does_not_hide_in_the_unit():
    entry = judged(hidden=lambda s: 700 * s.share)
    assert entry.verdict == "grows"
    assert {entry.verdict_of[name] for name in ("tpot", "step")} == {"grows"}
    assert entry.tpot_full_adds.us == pytest.approx(700 * 1.075, rel=0.2)
