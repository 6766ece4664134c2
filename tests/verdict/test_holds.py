# SPDX-License-Identifier: Apache-2.0
"""From steps to holds: which steps count, and the one number of each hold."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from kvtax.verdict.speed import Control, read_control, times_usual, too_slow

from kvtax.records.profile import Ladder
from kvtax.records.requests import Phase
from kvtax.steps.parts import attributed
from kvtax.steps.trial_steps import NO_THREADS
from kvtax.verdict.holds import held_steps, holds_of, places
from kvtax.verdict.levels import Level, thin
from kvtax.verdict.metrics import METRICS, Metric
from tests.verdict.steps import hold, sample

MEAN = Metric("schedule_us", "all", "mean")


def values_of(steps: pl.DataFrame, metric: Metric, robust: bool = True) -> list[float]:
    found = holds_of(steps, places(steps, NO_THREADS), metric, robust)
    return [] if found is None else found.values.tolist()


def test_steps_are_held_while_all_decoders_run():
    steps = pl.concat(
        hold(steps=1, batch=batch, phase=int(phase))
        for batch, phase in (
            (8, Phase.HOLD),
            (9, Phase.HOLD),
            (7, Phase.HOLD),
            (8, Phase.FILL),
            (8, Phase.PLATEAU),
            (8, Phase.GROWTH),
        )
    )
    assert held_steps(steps, 8)["batch"].to_list() == [8, 9]


# 0 to 198 us and one step of 10,000.
STALLED = [*map(float, range(199)), 10_000.0]
# A cost in 3 of 200 steps, as of a connector that works every 67th step.
RARE = [1.0] * 197 + [1_001.0] * 3


@pytest.mark.parametrize(
    ("us", "middle", "robust", "expected"),
    [
        (STALLED, "median", True, 99.5),
        # The slowest of 200 is beyond the 99th percentile; the others stay.
        (STALLED, "mean", True, 99.0),
        (STALLED, "mean", False, 148.505),
        (RARE, "median", True, 1.0),
        (RARE, "mean", True, 16.0),
        (RARE, "mean", False, 16.0),
        # Of fewer than 100 steps none is a hundredth: all stay.
        ([*[1.0] * 49, 101.0], "mean", True, 3.0),
    ],
)
def test_a_hold_is_a_median_or_a_mean_without_its_slowest_hundredth(
    us, middle, robust, expected
):
    steps = hold(steps=len(us), schedule_us=us)
    (value,) = values_of(steps, Metric("schedule_us", "all", middle), robust)
    assert value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "steps", "values"),
    [
        ("schedule", 20, [100.0]),
        ("schedule", 19, []),
        ("connector", 20, [100.0]),
        ("connector", 19, []),
        ("step_cpu", 19, []),
        ("scheduler_cpu", 19, []),
        ("prefill", 3, [100.0]),
        ("prefill", 2, []),
        ("threads", 1, [100.0]),
    ],
)
def test_a_hold_with_too_few_of_its_steps_has_no_value(metric, steps, values):
    prefills = metric == "prefill"
    own = hold(steps=steps, decode_only=not prefills, prefills=prefills)
    assert values_of(own, METRICS[metric]) == pytest.approx(values)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("schedule", 1.0),
        ("overhead", 2.0),
        ("step", 3.0),
        # 30 steps of 4 us, and 10 with a prompt; decode-only.
        ("step_cpu", 4.0),
        # All steps: (30 x 5 + 10 x 50) / 40.
        ("scheduler_cpu", 16.25),
        # (30 x 6 + 10 x 60) / 40, and of the steps with a prompt alone.
        ("connector", 19.5),
        ("prefill", 60.0),
        ("threads", 7.0),
    ],
)
def test_every_metric_takes_its_own_column_and_its_own_steps(metric, expected):
    names = ("schedule_us", "overhead_us", "step_us", "thread_cpu_us")
    names = (*names, "scheduler_cpu_us", "connector_us", "threads_us")
    decodes, prompts = (
        hold(
            steps=steps,
            decode_only=not prefills,
            prefills=prefills,
            **{name: (n + 1.0) * factor for n, name in enumerate(names)},
        )
        for steps, prefills, factor in ((30, False, 1), (10, True, 10))
    )
    if metric == "threads":
        prompts = prompts.with_columns(threads_us=None)
    steps = pl.concat([decodes, prompts])
    assert values_of(steps, METRICS[metric]) == pytest.approx([expected])


def test_a_median_is_no_mean():
    us = [1.0] * 21 + [101.0] * 19
    steps = hold(schedule_us=us, thread_cpu_us=us)
    assert values_of(steps, METRICS["schedule"]) == [1.0]
    assert values_of(steps, METRICS["step_cpu"]) == [48.5]


def test_a_step_that_was_not_timed_is_left_out_and_a_metric_that_never_was_is_none():
    steps = hold(schedule_us=[None, *[6.0] * 39])
    assert values_of(steps, MEAN) == [6.0]
    assert values_of(hold(schedule_us=None), MEAN) == []


def test_a_hold_has_its_server_level_cache_and_time():
    steps = pl.concat(
        [
            hold(1, 0, 2, at_s=40.0, cache_blocks=3_000, schedule_us=4.0),
            hold(0, 1, 0, at_s=20.0, cache_blocks=1_500, schedule_us=2.0),
            hold(0, 0, 1, at_s=10.0, cache_blocks=[1_000] * 20 + [2_000] * 20),
        ]
    )
    found = holds_of(steps, places(steps, NO_THREADS), MEAN)
    assert found.server.tolist() == [0, 0, 1]
    assert found.level.tolist() == [1, 0, 2]
    assert found.x.tolist() == [1.5, 1.5, 3.0]
    # The mean of 40 steps that are 1 ms apart.
    assert found.time_s.tolist() == pytest.approx([10.0195, 20.0195, 40.0195])
    assert found.values.tolist() == [100.0, 2.0, 4.0]


def machine(**columns) -> pl.DataFrame:
    """Four holds of one server, and one of another that is always as slow."""
    rows = [
        hold(0, 0, level, **{name: us[level] for name, us in columns.items()})
        for level in range(4)
    ]
    return pl.concat([*rows, hold(1, 0, 0)])


def test_slowness_is_a_multiple_of_the_servers_median_by_the_thread_of_outputs():
    threads = [sample(level=n, us=us) for n, us in enumerate((40, 80, 120, 160))]
    # Two samples of a hold count by their steps; other threads and phases do not.
    threads += [
        sample(level=0, us=360, steps=360),
        sample(1, us=4_000),
        sample(level=0, us=9_999, thread="MainThread"),
        sample(level=0, us=9_999, phase=Phase.GROWTH),
    ]
    at = places(machine(), pl.concat(threads))
    # Per step 1, 2, 3 and 4 us: the median is 2.5, the lower quartile 1 or 2.
    assert at["slowness"].to_list() == pytest.approx([0.4, 0.8, 1.2, 1.6, 1.0])
    assert at["disturbance"].to_list() == pytest.approx([1.0, 1.0, 1.5, 2.0, 1.0])


def test_slowness_of_the_engine_is_what_its_thread_does_besides():
    cpu = {"thread_cpu_us": (101.0, 102.0, 103.0, 104.0)}
    rest = machine(**cpu, scheduler_cpu_us=(100.0,) * 4, worker_calls_us=(None,) * 4)
    at = places(rest, NO_THREADS)
    own = at["slowness_of_engine"].to_list()[:4]
    assert own == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert at["slowness"].to_list() == [1.0] * 5
    assert at["disturbance"].to_list()[:4] == pytest.approx([1.0, 1.0, 1.5, 2.0])


def test_what_a_connector_takes_in_the_worker_is_no_slowness_of_the_engine():
    # The thread computes 10 us and all of the connector's 5 or 15; half of it if the
    # call waits for as long as it works.
    calls = [5.0, 15.0] * 20
    for share in (1.0, 0.5):
        steps = pl.concat(
            hold(
                level=level,
                worker_calls_us=[us * (1 + level) for us in calls],
                thread_cpu_us=[110 + share * us * (1 + level) for us in calls],
                scheduler_cpu_us=100.0,
            )
            for level in range(3)
        )
        at = places(steps, NO_THREADS)
        assert at["slowness_of_engine"].to_list() == pytest.approx([1.0] * 3)


def test_a_late_wake_of_the_model_disturbs_and_the_connectors_calls_do_not():
    model = (200.0, 200.0, 200.0, 500.0)
    steps = machine(execute_model_us=model, worker_calls_us=(100.0,) * 4)
    at = places(steps, NO_THREADS)
    assert at["disturbance"].to_list()[:4] == pytest.approx([1.0, 1.0, 1.0, 4.0])
    assert at["slowness"].to_list()[:4] == [1.0] * 4
    own = machine(
        execute_model_us=(200.0, 300.0, 400.0, 500.0),
        worker_calls_us=(100.0, 200.0, 300.0, 400.0),
        thread_cpu_us=(300.0, 400.0, 500.0, 600.0),
    )
    assert places(own, NO_THREADS)["disturbance"].to_list()[:4] == [1.0] * 4


def test_a_pause_in_one_step_disturbs_no_hold():
    paused = hold(level=3, execute_model_us=[1e6] + [200.0] * 39)
    steps = pl.concat(
        [*(hold(level=n, execute_model_us=200.0) for n in range(3)), paused]
    )
    assert places(steps, NO_THREADS)["disturbance"].to_list() == [1.0] * 4


@pytest.mark.parametrize(
    ("metric", "works"),
    # The engine's thread is a part of the whole step.
    [("schedule", 2), ("overhead", 2), ("connector", 2), ("step", 1), ("step_cpu", 1)],
)
def test_a_metric_is_held_against_the_works_that_it_is_no_part_of(metric, works):
    steps = machine()
    at = places(steps, NO_THREADS).with_columns(
        slowness=pl.lit(3.0), slowness_of_engine=pl.lit(2.0)
    )
    found = holds_of(steps, at, METRICS[metric])
    assert found.slowness.tolist() == [[3.0, 2.0][:works]] * 5


@pytest.mark.parametrize(
    ("levels", "stated"),
    [
        ([0.0, 0.3, 0.6, 0.92, 1.0], 3),
        ([0.0, 0.5, 1.0, 1.0], 1),
        ([0.0, 0.999], 1),
        # All are full: the last.
        ([1.0, 1.0], 1),
    ],
)
def test_the_stated_level_is_the_highest_below_a_full_cache(levels, stated):
    assert Ladder(levels, 1, 8, 200, 8, 12.0).stated_level == stated


def test_a_level_has_decode_only_steps_of_its_own():
    steps = pl.concat(
        [
            hold(level=3, steps=3, cache_blocks=[100, 200, 900]),
            hold(level=3, steps=5, decode_only=False),
            hold(level=2, steps=5),
        ]
    )
    assert Level.of(steps, 3).steps.height == 3
    assert Level.of(steps, 3).cache_blocks == 200
    assert Level.of(steps, 4) is None


def test_quantiles_are_times_that_were_measured():
    us = [float(n) for n in range(1, 101)]
    level = Level.of(hold(level=3, steps=100, schedule_us=us, bind_us=None), 3)
    # 49.5, 89.1 and 98.01 steps are below: the next ones.
    assert level.quantiles("schedule_us") == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert level.quantiles("bind_us") is None


def test_parts_are_means_of_the_middle_half_of_the_steps():
    # Of 8 steps, the quartiles are the third and the seventh.
    step_us = [1_000.0 * n for n in (90, 7, 6, 5, 4, 3, 2, 1)]
    level = Level.of(
        hold(
            steps=8,
            step_us=step_us,
            schedule_us=[0.1 * us for us in step_us],
            build_meta_us=[0.01 * us for us in step_us],
            execute_model_us=[0.5 * us for us in step_us],
            update_us=50.0,
            bind_us=None,
            start_load_kv_us=10.0,
            wait_for_save_us=20.0,
            get_finished_us=30.0,
        ),
        0,
    )
    assert level.attribution_us() == {
        "schedule_without_build_meta": 450.0,
        "build_meta": 50.0,
        "bind": None,
        "start_load_kv": 10.0,
        "wait_for_save": 20.0,
        "get_finished": 30.0,
        "execute_model_rest": 2_440.0,
        "update": 50.0,
        # 5,000 less 500, 2,500 and 50.
        "other": 1_950.0,
        "step": 5_000.0,
    }


def test_steps_without_a_worker_record_are_in_no_part():
    level = Level.of(
        hold(
            steps=3,
            step_us=[1_000.0, 2_000.0, 9_000.0],
            execute_model_us=[500.0, 1_500.0, None],
        ),
        0,
    )
    assert level.attribution_us()["step"] == 2_000.0


def test_the_parts_add_up_to_the_step():
    names = ("schedule", "build_meta", "step", "update", "execute_model", "bind")
    names = (*names, "start_load_kv", "wait_for_save", "get_finished")
    us = dict(
        zip(names, (50.0, 7.0, 400.0, 30.0, 200.0, 1.0, 2.0, 4.0, 8.0), strict=True)
    )
    parts = attributed({f"{name}_us": value for name, value in us.items()})
    whole = parts.pop("step")
    assert whole == sum(parts.values()) == 400.0
    assert parts["execute_model_rest"] == 185.0
    assert parts["other"] == 120.0
    assert parts["schedule_without_build_meta"] == 43.0


@pytest.mark.parametrize(
    ("steps", "most", "left"),
    [
        (10, 10, list(range(10))),
        (11, 10, [0, 2, 4, 6, 8, 10]),
        (7, 3, [0, 3, 6]),
        (0, 3, []),
    ],
)
def test_every_kth_step_is_kept(steps, most, left):
    table = pl.DataFrame({"n": list(range(steps))})
    assert thin(table, most)["n"].to_list() == left


def control(times: float = 1.0, batch: float = 8.0, samples: int = 20) -> Control:
    """A thread that takes 20 us, and 2 more for each request of the batch."""
    spread = np.linspace(-1, 1, samples)
    size = np.full(samples, batch) + spread
    return Control(np.arange(samples), size, times * (20 + 2 * size))


@pytest.mark.parametrize(
    ("times", "expected"),
    [(1.0, None), (1.45, None), (1.55, 1.55), (3.0, 3.0), (0.5, None)],
)
def test_a_trial_on_a_machine_half_as_slow_again_is_set_aside(times, expected):
    found = too_slow([control(), control(), control(), control(times), None])
    *others, slow, without = found
    assert [*others, without] == [None] * 4
    assert slow == (expected and pytest.approx(expected, rel=0.01))


def test_a_larger_batch_is_no_slow_machine():
    found = times_usual([control(), control(), control(batch=24.0), control(2.0)])
    assert found == pytest.approx([1.0, 1.0, 1.0, 2.0], rel=0.01)


def test_usual_is_what_most_trials_take():
    slow = times_usual([control(4.0), control(), control()])
    assert slow == pytest.approx([4.0, 1.0, 1.0], rel=0.01)
    assert times_usual([None, None]) == [None, None]


@pytest.mark.parametrize(
    ("samples", "steps", "known"),
    [(10, 20, True), (9, 20, False), (10, 19, False)],
)
def test_a_control_has_ten_samples_of_twenty_steps(samples, steps, known):
    threads = pl.concat(
        sample(us=30.0 * steps, steps=steps, step_id=(n + 1) * steps - 1)
        for n in range(samples)
    )
    table = hold(steps=samples * steps)
    assert (read_control(table, threads) is not None) == known


def test_a_sample_has_the_steps_up_to_its_own_and_their_mean_batch():
    ends = [(n + 1) * 20 - 1 for n in range(10)]
    threads = pl.concat(
        [sample(us=20.0 * (n + 1), steps=20, step_id=end) for n, end in enumerate(ends)]
        + [sample(us=1.0, steps=20, step_id=19, thread="MainThread")]
    )
    # The first 20 steps have 2 and 4 requests; the last ones belong to the end.
    batch = [2, 4] * 10 + [6] * 160 + [9] * 25
    found = read_control(hold(steps=205, batch=batch), threads)
    assert found.ends.tolist() == ends
    assert found.us.tolist() == [float(n) for n in range(1, 11)]
    assert found.batch.tolist() == [3.0, *[6.0] * 8, 9.0]
