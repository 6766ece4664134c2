# SPDX-License-Identifier: Apache-2.0
"""What costs.direct_read.cost measures, and the rows that it comes to."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SEED = 20_240_731
BOOTSTRAPS = 2_000
NOOP, AGAIN = "no-op connector", "no-op again"
IDLE, IDLE_AGAIN = "direct_read, nobody reads", "direct_read again"


class Chunk(NamedTuple):
    """What some decode-only steps took: us of each, and CPU seconds by thread."""

    step_us: np.ndarray
    seconds: float
    cpu_s: dict[str, float]
    cached_blocks: int


class Load(NamedTuple):
    """Of a load that has ended: its reads and lookups, and what they took.

    `lookup_us`, `read_us` and `validate_us` are of each; a load that only looks up
    has the first.
    """

    offered_blocks: int
    valid_blocks: int
    seconds: float
    cpu_s: float
    lookup_us: np.ndarray
    read_us: np.ndarray
    validate_us: np.ndarray


# By row: each round's chunk, and the load that was on.
Samples = dict[str, list[tuple[Chunk, Load | None]]]


def control(name: str) -> str:
    """The row of the same load on another engine."""
    return f"{name}, of another engine"


class Ratio(msgspec.Struct):
    """A ratio of step times, with its 95 % interval."""

    value: float
    ci95: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.ci95
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


class Served(msgspec.Struct):
    """What a load got in all rounds: a second, share valid, and ms of its parts."""

    per_s: float
    valid_share: float | None
    lookup_ms: dict[str, float]
    whole_ms: dict[str, float]
    reader_cpu_share: float


class Row(msgspec.Struct):
    """One condition at one size; a load also against its control.

    `step_us`: median over the rounds of their mean, quantiles over all steps.
    `cpu_to_noop` is of the CPU time of the engine's thread.
    `cpu_share`: of a core, by kind of thread in the engine's process.
    """

    cached_blocks: int
    name: str
    rounds: int
    steps: int
    step_us: dict[str, float]
    to_noop: Ratio
    cpu_to_noop: Ratio
    to_idle: Ratio
    control_to_idle: Ratio | None
    to_control: Ratio | None
    cpu_share: dict[str, float]
    served: Served | None


class Calls(msgspec.Struct):
    """us of the connector's calls of a step in a tight loop, by engine."""

    cached_blocks: int
    us: dict[str, float]


def ratio(times: Floats, base: Floats) -> Ratio:
    """Median over the rounds of `times` to `base`, both (rounds,)."""
    of_round = times / base
    rng = np.random.default_rng(SEED)
    draws = np.median(rng.choice(of_round, (BOOTSTRAPS, len(of_round))), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return Ratio(float(np.median(of_round)), (float(low), float(high)))


def rows_of(samples: Samples) -> list[Row]:
    """One for each condition, which has its control within it."""
    mean_us = {
        name: np.array([chunk.step_us.mean() for chunk, _ in taken])
        for name, taken in samples.items()
    }
    found = []
    cpu_s = {
        name: np.array([chunk.cpu_s["engine"] for chunk, _ in taken])
        for name, taken in samples.items()
    }
    controls = {control(name) for name in samples}
    for name, taken in samples.items():
        if name in controls:
            continue
        chunks = [chunk for chunk, _ in taken]
        loads = [load for _, load in taken if load is not None]
        steps_us = np.concatenate([chunk.step_us for chunk in chunks])
        seconds = sum(chunk.seconds for chunk in chunks)
        alike_us = mean_us.get(control(name))
        found.append(
            Row(
                cached_blocks=round(np.median([c.cached_blocks for c in chunks])),
                name=name,
                rounds=len(taken),
                steps=len(steps_us),
                step_us={"mean": float(np.median(mean_us[name]))} | quantiles(steps_us),
                to_noop=ratio(mean_us[name], mean_us[NOOP]),
                cpu_to_noop=ratio(cpu_s[name], cpu_s[NOOP]),
                to_idle=ratio(mean_us[name], mean_us[IDLE]),
                control_to_idle=None
                if alike_us is None
                else ratio(alike_us, mean_us[IDLE]),
                to_control=None if alike_us is None else ratio(mean_us[name], alike_us),
                cpu_share={
                    kind: sum(chunk.cpu_s[kind] for chunk in chunks) / seconds
                    for kind in chunks[0].cpu_s
                },
                served=served(loads) if loads else None,
            )
        )
    return found


def served(loads: list[Load]) -> Served:
    seconds = sum(load.seconds for load in loads)
    offered = sum(load.offered_blocks for load in loads)
    valid = sum(load.valid_blocks for load in loads)
    lookup_us = np.concatenate([load.lookup_us for load in loads])
    whole_us = np.concatenate(
        [load.lookup_us + load.read_us + load.validate_us for load in loads]
    )
    reads = any(load.read_us.any() for load in loads)
    return Served(
        per_s=len(lookup_us) / seconds,
        valid_share=valid / offered if reads and offered else None,
        lookup_ms=quantiles(lookup_us / 1e3),
        whole_ms=quantiles(whole_us / 1e3),
        reader_cpu_share=sum(load.cpu_s for load in loads) / seconds,
    )


def quantiles(values: Floats) -> dict[str, float]:
    return {
        name: float(np.quantile(values, q)) if len(values) else 0.0
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
