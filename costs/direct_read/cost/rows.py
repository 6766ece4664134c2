# SPDX-License-Identifier: Apache-2.0
"""What costs.direct_read.cost measures, and the rows that come of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from costs.results import quantiles
from lab.stats.interval import Interval
from lab.stats.rounds import ratio

Floats = NDArray[np.float64]

NOOP, AGAIN = "no-op connector", "no-op again"
IDLE, IDLE_AGAIN = "direct_read, nobody reads", "direct_read again"


class Chunk(NamedTuple):
    """What some decode-only steps took: us of each, and CPU seconds by thread."""

    step_us: np.ndarray
    seconds: float
    cpu_s: dict[str, float]
    cached_blocks: int


class Reads(NamedTuple):
    """What one load did while it was on: its reads or lookups, and what they took.

    `lookup_us`, `read_us` and `validate_us` are of each, (reads,). A load that only
    looks up has zeros in the last two.
    """

    offered_blocks: int
    valid_blocks: int
    seconds: float
    cpu_s: float
    lookup_us: np.ndarray
    read_us: np.ndarray
    validate_us: np.ndarray


# By row: each round's chunk, and the load that was on.
Samples = dict[str, list[tuple[Chunk, Reads | None]]]


def control(name: str) -> str:
    """The row of the same load on another engine."""
    return f"{name}, of another engine"


class Served(msgspec.Struct):
    """What a load got in all rounds: reads per second, valid share, ms of its parts."""

    per_s: float
    valid_share: float | None
    lookup_ms: dict[str, float]
    whole_ms: dict[str, float]
    reader_cpu_share: float


class Row(msgspec.Struct):
    """One condition at one cache size; a load also against its control.

    `step_us`: median over the rounds of their mean, quantiles over all steps.
    `cpu_to_noop` is of the CPU time of the engine's thread.
    `cpu_share`: of a core, by kind of thread in the engine's process.
    """

    cached_blocks: int
    name: str
    rounds: int
    steps: int
    step_us: dict[str, float]
    to_noop: Interval
    cpu_to_noop: Interval
    to_idle: Interval
    control_to_idle: Interval | None
    to_control: Interval | None
    cpu_share: dict[str, float]
    served: Served | None


class Calls(msgspec.Struct):
    """us of the connector's calls of a step in a tight loop, by engine."""

    cached_blocks: int
    us: dict[str, float]


def rows_of(samples: Samples) -> list[Row]:
    """One row per condition, compared with its control if it has one."""
    controls = {control(name) for name in samples}
    return [_row(name, samples) for name in samples if name not in controls]


def _row(name: str, samples: Samples) -> Row:
    chunks = [chunk for chunk, _ in samples[name]]
    reads = [one for _, one in samples[name] if one is not None]
    steps_us = np.concatenate([chunk.step_us for chunk in chunks])
    seconds = sum(chunk.seconds for chunk in chunks)
    mean_us = mean_step_us(samples[name])
    noop_us, idle_us = mean_step_us(samples[NOOP]), mean_step_us(samples[IDLE])
    has_control = control(name) in samples
    control_us = mean_step_us(samples[control(name)]) if has_control else None
    cpu_to_noop = ratio(engine_cpu_s(samples[name]), engine_cpu_s(samples[NOOP]))
    return Row(
        cached_blocks=round(np.median([c.cached_blocks for c in chunks])),
        name=name,
        rounds=len(chunks),
        steps=len(steps_us),
        step_us={"mean": float(np.median(mean_us))} | quantiles(steps_us),
        to_noop=Interval.of(ratio(mean_us, noop_us)),
        cpu_to_noop=Interval.of(cpu_to_noop),
        to_idle=Interval.of(ratio(mean_us, idle_us)),
        control_to_idle=Interval.of(ratio(control_us, idle_us))
        if has_control
        else None,
        to_control=Interval.of(ratio(mean_us, control_us)) if has_control else None,
        cpu_share={
            kind: sum(chunk.cpu_s[kind] for chunk in chunks) / seconds
            for kind in chunks[0].cpu_s
        },
        served=served(reads) if reads else None,
    )


def mean_step_us(rounds: list[tuple[Chunk, Reads | None]]) -> Floats:
    """(rounds,) mean step of each."""
    return np.array([chunk.step_us.mean() for chunk, _ in rounds])


def engine_cpu_s(rounds: list[tuple[Chunk, Reads | None]]) -> Floats:
    """(rounds,) CPU seconds of the engine's thread."""
    return np.array([chunk.cpu_s["engine"] for chunk, _ in rounds])


def served(of_rounds: list[Reads]) -> Served:
    seconds = sum(one.seconds for one in of_rounds)
    offered = sum(one.offered_blocks for one in of_rounds)
    valid = sum(one.valid_blocks for one in of_rounds)
    lookup_us = np.concatenate([one.lookup_us for one in of_rounds])
    whole_us = np.concatenate(
        [one.lookup_us + one.read_us + one.validate_us for one in of_rounds]
    )
    reads = any(one.read_us.any() for one in of_rounds)
    return Served(
        per_s=len(lookup_us) / seconds,
        valid_share=valid / offered if reads and offered else None,
        lookup_ms=quantiles(lookup_us / 1e3),
        whole_ms=quantiles(whole_us / 1e3),
        reader_cpu_share=sum(one.cpu_s for one in of_rounds) / seconds,
    )
