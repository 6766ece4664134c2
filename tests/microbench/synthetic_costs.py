# SPDX-License-Identifier: Apache-2.0
"""Runs of connectors with a known cost in every place that the records tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from kvtax.records.steps import EngineHeader, ThreadsHeader, WorkerHeader
from tests.harness.made_up import write_lines
from tests.microbench.synthetic import (
    Truth,
    layout,
    trial_steps,
    write_run,
)

STEPS, BLOCKS, REPEATS = 8_000, 16_000, 2
SAMPLE_STEPS = 40


@dataclass(frozen=True)
class Facts:
    """What a connector can know of each step: arrays of [steps]."""

    blocks_1k: np.ndarray
    running: np.ndarray
    prefills: np.ndarray
    number: np.ndarray
    stored_1k: np.ndarray  # blocks that were ever cached
    since_reset: np.ndarray  # steps


Cost = Callable[[Facts], np.ndarray]


def growing(us_per_1k_blocks: float) -> Cost:
    return lambda facts: us_per_1k_blocks * facts.blocks_1k


def records(costs: dict[str, Cost], seed: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Engine and worker steps of a connector with `costs`, with all clocks."""
    rng = np.random.default_rng(1_000 + seed)
    engine, worker = trial_steps(Truth("", build_meta=1), 0, seed, STEPS, BLOCKS)
    number, running = np.arange(STEPS), engine["scheduled"].to_numpy()
    prefills = engine["prefill_tokens"].to_numpy() > 0
    blocks_1k = engine["cache_size"].to_numpy() / 1_000
    resets = [0, *(span.first for span in layout(STEPS) if span.level == 0)]
    since_reset = (
        number - np.array(resets)[np.searchsorted(resets, number, "right") - 1]
    )
    stored_1k = np.cumsum(np.maximum(np.diff(blocks_1k, prepend=0), 0))
    facts = Facts(blocks_1k, running, prefills, number, stored_1k, since_reset)
    own_us = ("scheduler.build_connector_meta", "worker.get_finished")
    methods = {name: rng.exponential(0.5, STEPS) for name in own_us}
    sides = ("scheduler", "worker", "a thread", "the engine")
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
        step_us=engine["step_us"] + sum(more_us.values()) - more_us["a thread"],
        schedule_cpu_us=schedule_cpu,
        update_cpu_us=engine["update_us"],
        thread_cpu_us=own_cpu,
        a_thread_us=rng.exponential(20, STEPS) + more_us["a thread"],
        connector_self_us=self_us("scheduler"),
    )
    worker = worker.with_columns(
        execute_model_us=execute,
        get_finished_us=methods["worker.get_finished"],
        connector_self_us=self_us("worker"),
    )
    return engine, worker


def headers(engine: pl.DataFrame, worker: pl.DataFrame) -> tuple[msgspec.Struct, ...]:
    """They name the methods that are timed."""
    return tuple(
        kind(pid=1, methods=frame["connector_self_us"].struct.fields)
        for kind, frame in ((EngineHeader, engine), (WorkerHeader, worker))
    )


def threads_of(engine: pl.DataFrame) -> pl.DataFrame:
    """What its thread took, in samples of SAMPLE_STEPS steps."""
    spent = engine["a_thread_us"].rolling_sum(SAMPLE_STEPS)
    samples = engine.select("t_ns", "step_id", pl.Series("us", spent).round(3))
    return (
        samples.gather_every(SAMPLE_STEPS, offset=SAMPLE_STEPS - 1)
        .with_columns(pl.struct(pl.col("us").alias("a thread")).alias("threads"))
        .drop("us")
    )


def write_costs(folder: Path, configs: Mapping[str, dict[str, Cost]]) -> None:
    """A run of REPEATS trials of each config.

    By where a config spends its time: a method of the connector, "a thread", or "the
    engine", which is time of the step in no connector method.
    """
    write_run(folder, [Truth(name) for name in configs], REPEATS, STEPS, BLOCKS)
    for number, (name, costs) in enumerate(configs.items()):
        for repeat in range(REPEATS):
            trial = folder / name / f"r{repeat}"
            steps = records(costs, 100 * number + repeat)
            files = ("engine_step.jsonl", "worker_step.r0.jsonl")
            for file, header, frame in zip(files, headers(*steps), steps, strict=True):
                write_lines(trial / file, header, [frame])
            threads = threads_of(steps[0])
            write_lines(trial / "threads.jsonl", ThreadsHeader(pid=1), [threads])
