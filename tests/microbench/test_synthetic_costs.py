# SPDX-License-Identifier: Apache-2.0
"""Ways to grow with |cache| that have passed for flat, in records of known truth.

The same costs in real servers: configs/profiles/synthetic.toml.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl
import pytest

from benchmarks import power
from kvtax.records.files import LineFile
from kvtax.records.steps import EngineHeader, ThreadsHeader, ThreadTimes, WorkerHeader
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run
from studies.results import BadArguments
from tests.harness.made_up import FIRST_NS, write_lines
from tests.microbench.synthetic import (
    LADDER,
    THREAD,
    Cpu,
    Truth,
    layout,
    trial_steps,
    write_requests,
    write_run,
)

STEPS, BLOCKS, REPEATS = 8_000, 16_000, 2


@dataclass(frozen=True)
class Facts:
    """What a connector can know of each step: arrays of [steps]."""

    blocks_1k: np.ndarray
    running: np.ndarray
    prefills: np.ndarray
    number: np.ndarray
    stored_1k: np.ndarray  # blocks that were ever cached
    since_reset: np.ndarray  # steps
    rng: np.random.Generator


Cost = Callable[[Facts], np.ndarray]
# Where a cost may be beside the steps.
A_THREAD, A_PROCESS = "a thread", "a process"


def growing(us_per_1k_blocks: float) -> Cost:
    return lambda facts: us_per_1k_blocks * facts.blocks_1k


class Recorded(NamedTuple):
    """Records of a trial."""

    engine: pl.DataFrame
    worker: pl.DataFrame
    cpu: Cpu


def records(costs: dict[str, Cost], seed: int) -> Recorded:
    """Make the records of a connector with `costs`, with all clocks."""
    rng = np.random.default_rng(1_000 + seed)
    engine, worker = trial_steps(Truth("", build_meta=1), 0, seed, STEPS, BLOCKS)
    number, running = np.arange(STEPS), engine["scheduled"].to_numpy()
    prefills = engine["prefill_tokens"].to_numpy() > 0
    blocks_1k = engine["cache_size"].to_numpy() / 1_000
    resets = [0, *(span.first for span in layout(STEPS) if span.reset)]
    since_reset = (
        number - np.array(resets)[np.searchsorted(resets, number, "right") - 1]
    )
    stored_1k = np.cumsum(np.maximum(np.diff(blocks_1k, prepend=0), 0))
    facts = Facts(blocks_1k, running, prefills, number, stored_1k, since_reset, rng)
    own_us = ("scheduler.build_connector_meta", "worker.get_finished")
    methods = {name: rng.exponential(0.5, STEPS) for name in own_us}
    sides = ("scheduler", "worker", "the engine", A_THREAD, A_PROCESS)
    more_us = dict.fromkeys(sides, np.zeros(STEPS))
    for where, cost in costs.items():
        us = cost(facts)
        more_us[where.partition(".")[0]] = more_us[where.partition(".")[0]] + us
        if "." in where:
            methods[where] = methods.get(where, 0.0) + us

    def self_us(side: str) -> pl.Series:
        of = {name: us for name, us in methods.items() if name.startswith(side)}
        named = {name.partition(".")[2]: us.round(3) for name, us in of.items()}
        return pl.DataFrame(named).to_struct("connector_self_us")

    schedule = engine["schedule_us"] + more_us["scheduler"]
    execute = worker["execute_model_us"] + more_us["worker"]
    # A stalled machine works no more than another.
    schedule_cpu = 40 + 3.0 * running + rng.exponential(4, STEPS) + more_us["scheduler"]
    own_cpu = schedule_cpu + engine["update_us"] + execute
    engine = engine.with_columns(
        schedule_us=schedule,
        step_us=engine["step_us"]
        + sum(more_us[side] for side in ("scheduler", "worker", "the engine")),
        schedule_cpu_us=schedule_cpu,
        update_cpu_us=engine["update_us"],
        thread_cpu_us=own_cpu,
        connector_self_us=self_us("scheduler"),
    )
    worker = worker.with_columns(
        execute_model_us=execute,
        get_finished_us=methods["worker.get_finished"],
        connector_self_us=self_us("worker"),
    )
    thread = rng.exponential(20, STEPS) + more_us[A_THREAD]
    processes = 500 + rng.exponential(100, STEPS) + thread + more_us[A_PROCESS]
    return Recorded(engine, worker, Cpu(processes, thread))


def headers(engine: pl.DataFrame, worker: pl.DataFrame) -> tuple[msgspec.Struct, ...]:
    """They name the methods that are timed."""
    return tuple(
        kind(pid=1, methods=frame["connector_self_us"].struct.fields)
        for kind, frame in ((EngineHeader, engine), (WorkerHeader, worker))
    )


def write_threads(path: Path, name: str) -> None:
    """Write the recorder's file, in which THREAD has this name."""
    with LineFile(path, ThreadsHeader(pid=1)) as file:
        threads = {f"{name}#{THREAD}": 1.0}
        file.append(ThreadTimes(t_ns=FIRST_NS, step_id=0, threads=threads))


def write_costs(folder: Path, configs: Mapping[str, dict[str, Cost]]) -> None:
    """A run of REPEATS trials of each config.

    By where a config spends its time: a method of the connector, A_THREAD, A_PROCESS,
    or "the engine", which is time of the step in no connector method.
    """
    write_run(folder, [Truth(name) for name in configs], REPEATS, STEPS, BLOCKS)
    for number, (name, costs) in enumerate(configs.items()):
        for repeat in range(REPEATS):
            trial = folder / name / f"r{repeat}"
            engine, worker, cpu = records(costs, 100 * number + repeat)
            of_engine, of_worker = headers(engine, worker)
            write_lines(trial / "engine_step.jsonl", of_engine, [engine])
            write_lines(trial / "worker_step.r0.jsonl", of_worker, [worker])
            write_threads(trial / "threads.jsonl", "records-of-blocks")
            (trial / "requests.jsonl").unlink()
            write_requests(trial / "requests.jsonl", STEPS, 1.0, cpu)


HIDDEN = "in no method"


def every_third(facts: Facts) -> np.ndarray:
    return np.where(facts.number % 3 == 0, 60 * facts.blocks_1k, 0)


def prefill_only(facts: Facts) -> np.ndarray:
    return np.where(facts.prefills, 2_000 * facts.blocks_1k, 0)


def where_requests_end(facts: Facts) -> np.ndarray:
    return np.where(facts.number % 60 == 30, 1_200 * facts.blocks_1k, 0)


def beyond_half(facts: Facts) -> np.ndarray:
    return 40 * np.maximum(facts.blocks_1k - BLOCKS / 2_000, 0)


def stalls(facts: Facts) -> np.ndarray:
    hit = facts.rng.random(len(facts.number)) < 1 / 190
    return np.where(hit & (facts.blocks_1k > BLOCKS / 2e3), 6_000.0, 0)


GROWING: dict[str, dict[str, Cost]] = {
    "one method cancels the other": {
        "worker.get_finished": growing(3),
        "worker.get_block_ids_with_load_errors": growing(6),
    },
    "a hook that had no clock": {"worker.get_kv_connector_stats": growing(20)},
    "a hook of a layer": {"worker.save_kv_layer": growing(20)},
    "before a step": {"scheduler.get_num_new_matched_tokens": prefill_only},
    "every third step": {"worker.get_finished": every_third},
    "steps with prefill": {"scheduler.build_connector_meta": prefill_only},
    "steps in which a request ends": {
        "scheduler.request_finished_all_groups": where_requests_end
    },
    "in the worker after a request ended": {"worker.get_finished": where_requests_end},
    "a thread": {A_THREAD: growing(20)},
    "a process": {A_PROCESS: growing(60)},
    "steps with 12 requests and more": {
        "worker.get_finished": lambda f: 40 * f.blocks_1k * (f.running >= 12)
    },
    "stalls of 6 ms in one step of 190": {"worker.get_finished": stalls},
    "beyond half of the cache": {"worker.get_finished": beyond_half},
    "the square": {"worker.get_finished": lambda f: 1.3 * f.blocks_1k**2},
}
NOT_GROWING: dict[str, dict[str, Cost]] = {
    "nothing": {},
    "a constant": {"worker.get_finished": lambda f: np.full(len(f.number), 200.0)},
    "running requests": {"scheduler.build_connector_meta": lambda f: 20 * f.running},
}


SHAPES: dict[str, tuple[Cost, str]] = {
    "linear": (growing(20), "linear"),
    "1 ms when nearly full": (
        lambda f: np.where(f.blocks_1k > 0.985 * BLOCKS / 1e3, 1_000.0, 0),
        "only when full",
    ),
    "100 us from a tenth of the cache on": (
        lambda f: 100 * np.minimum(f.blocks_1k / (0.1 * BLOCKS / 1e3), 1),
        "saturating",
    ),
    "200 us from half of the cache on": (
        lambda f: np.where(f.blocks_1k > BLOCKS / 2e3, 200.0, 0),
        "step",
    ),
    "up and back": (
        lambda f: 200 * (1 - np.abs(2 * f.blocks_1k / (BLOCKS / 1e3) - 1)),
        "not monotone",
    ),
    "the square": (lambda f: 1.3 * f.blocks_1k**2, "curved"),
}
DRIFTING: dict[str, dict[str, Cost]] = {
    "all ever stored": {"worker.get_finished": lambda f: 6 * f.stored_1k},
    "the time since the last reset": {
        "worker.get_finished": lambda f: 0.5 * f.since_reset
    },
}


def per_request(facts: Facts) -> np.ndarray:
    return np.where(facts.number % 60 == 30, 2_000 * facts.blocks_1k, 0)


COSTS = GROWING | NOT_GROWING | {HIDDEN: {"the engine": growing(20)}}
COSTS |= {name: {"worker.get_finished": cost} for name, (cost, _) in SHAPES.items()}
COSTS |= DRIFTING | {
    # Each is below the margin, their sum is not.
    "two parts": {
        "scheduler.build_connector_meta": growing(1.8),
        "worker.get_finished": growing(1.8),
    },
    "falling": {"worker.get_finished": lambda f: 400 - 20 * f.blocks_1k},
    "each request": {"scheduler.request_finished": per_request},
}
VERDICTS = dict.fromkeys(COSTS, "grows") | dict.fromkeys(DRIFTING, "drifts")
VERDICTS |= dict.fromkeys([*NOT_GROWING, "falling"], "flat")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """What a run of all these connectors says of each of them."""
    folder = tmp_path_factory.mktemp("run")
    write_costs(folder, COSTS)
    return analyse(*load_run(folder), None).document.configs


@pytest.mark.slow
@pytest.mark.parametrize("name", COSTS)
def test_a_cost_has_its_verdict_wherever_it_is(name, configs):
    assert configs[name].verdict == VERDICTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, "falling"])
def test_every_shape_is_named(name, configs):
    shape = SHAPES[name][1] if name in SHAPES else "falls"
    assert configs[name].held["calls"].shape == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("a thread", "threads"),
        ("a process", "processes"),
        ("steps with 12 requests and more", "calls_many"),
        ("stalls of 6 ms in one step of 190", "rare"),
        (HIDDEN, "step"),
    ],
)
def test_growth_is_seen_in_the_part_that_it_is_in_where_no_other_shows_it(
    name, metric, configs
):
    of = configs[name].verdict_of
    assert of[metric] == "grows"
    assert of["timed"] != "grows"


def without_a_clock(trial: Path) -> None:
    """Have a method that the recorder could not time."""
    path = trial / "worker_step.r0.jsonl"
    header, _, rest = path.read_text().partition("\n")
    known = json.loads(header) | {"not_timed": {"get_finished": "an object"}}
    path.write_text(f"{json.dumps(known)}\n{rest}")


def without_threads(trial: Path) -> None:
    """Have no record of threads."""
    (trial / "threads.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (without_a_clock, ["threads", "timed", "timed_many"]),
        (without_threads, ["threads"]),
    ],
)
def test_nothing_is_flat_of_which_a_part_is_missing(tmp_path, damage, missing):
    write_costs(tmp_path, {"whole": {}, "damaged": {}})
    for trial in (tmp_path / "damaged").iterdir():
        damage(trial)
    configs = analyse(*load_run(tmp_path), None).document.configs
    assert configs["whole"].verdict == "flat"
    assert configs["damaged"].verdict == "inconclusive"
    assert configs["damaged"].not_measured == missing


FLAT = [f"flat_{number}" for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_costs(folder, {name: {} for name in FLAT})
    return folder


def measured(folder, capsys, *arguments: str) -> str:
    """Return the output of the benchmark `power` for the configs of FLAT."""
    flat = [word for name in FLAT for word in ("--flat", name)]
    parser = argparse.ArgumentParser()
    power.configure(parser)
    out = ("--out", str(folder / "power.md"))
    given = parser.parse_args([str(folder), *flat, *out, *arguments])
    assert power.run(given) == 0
    return capsys.readouterr().out


# A size of each cost that no run may miss.
LARGE = {
    "a call of the connector in each step": 20.0,
    "the same, three times as much in every third step": 20.0,
    "the same, in each step with prefill alone": 100.0,
    "a thread of its own": 20.0,
    "a call, from half of the cache on": 200.0,
    "a call, only when the cache is full": 300.0,
    "a call, constant from a tenth of the cache on": 200.0,
}


@pytest.mark.slow
def test_growth_beyond_the_margin_is_caught_everywhere_and_less_is_not(
    folder, monkeypatch, capsys
):
    costs = {
        # So little that it is within the margin of three parts, too.
        name: dataclasses.replace(power.COSTS[name], sizes=(0.2, size))
        for name, size in LARGE.items()
    }
    monkeypatch.setattr(power, "COSTS", costs)
    text = measured(folder, capsys, "--repeats", "2")
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    for name, size in LARGE.items():
        assert f"| 0.2: 0% / 100% | {size:g}: 100% / 0% | {size:g} |" in rows[name]
    assert "False *grows*: 0 of 4 with nothing added (*flat*: 4), 0 of 28" in text
    assert "Of each cost 4 verdicts: 1 draws of up to 2 servers of 4 configs" in text
    raw = json.loads((folder / "power.json").read_text())
    assert raw["verdicts"]["a thread of its own"]["20"] == ["grows"] * 4


@pytest.fixture(scope="module")
def trial(folder):
    _, (trial, *_) = power.load_run(folder)
    return trial


@pytest.mark.slow
@pytest.mark.parametrize("name", power.COSTS)
def test_a_cost_is_added_as_a_mean_over_the_steps_that_have_it(name, trial):
    cost = power.COSTS[name]
    grown = power.add(trial, cost, size=20.0)
    share = pl.col("cache_blocks") / BLOCKS
    full_us = {
        power.prefills: pl.when("prefills").then(pl.col("cache_blocks") / 1e3),
        power.from_half: (share >= 0.5).cast(pl.Float64),
        power.when_full: (share > 0.985).cast(pl.Float64),
        power.saturating: pl.min_horizontal(10 * share, 1.0),
    }.get(cost.shape, pl.col("cache_blocks") / 1e3)
    # Few steps are rare ones.
    within = 1.0 if cost.shape is power.rare else 0.02
    times = {time for part in cost.parts for time in part}
    for time in times & set(trial.steps.columns):
        parts = sum(time in part for part in cost.parts)
        more_us = grown.steps[time] - trial.steps[time]
        expected = trial.steps.select(full_us.fill_null(0).mean()).item()
        assert more_us.mean() == pytest.approx(20 * parts * expected, rel=within)


@pytest.mark.slow
def test_the_cost_of_a_thread_is_added_to_each_hold(trial):
    grown = power.add(trial, power.COSTS["a thread of its own"], size=20.0)
    assert grown.steps.equals(trial.steps)
    added = grown.readings.filter(pl.col("level") == len(LADDER.levels) - 1)
    full = added["thread of its own"]
    assert full.to_list() == pytest.approx([20 * BLOCKS / 1e3] * len(full), rel=0.01)
    assert len(full) == LADDER.passes


@pytest.mark.slow
def test_only_a_rise_beyond_the_margin_makes_flat_a_false_word():
    call = power.Cost(power.linear, ())
    assert not call.grows(1.9, BLOCKS) and call.grows(2.1, BLOCKS)
    step = power.Cost(power.from_half, (), per_1k=False)
    assert not step.grows(31.0, BLOCKS) and step.grows(33.0, BLOCKS)


@pytest.mark.slow
def test_a_config_that_is_not_in_the_run_is_refused(folder, capsys):
    with pytest.raises(BadArguments, match="nobody"):
        measured(folder, capsys, "--flat", "nobody")
