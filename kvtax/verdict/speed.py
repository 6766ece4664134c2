# SPDX-License-Identifier: Apache-2.0
"""The machine's slowness, read from work that no connector takes part in.

A shared machine is faster or slower for seconds at a time, up to twice, which tilts a
slope as growth would. vLLM's thread that packs and sends the outputs does the same for
every token, runs none of a connector's code, and waits for none of it in CPU time. What
it takes per step is how slow the machine was then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from kvtax.stats.distribution import Floats, Ints
from kvtax.stats.least_squares import least_absolute_line
from kvtax.verdict.metrics import number

CONTROL = r"\(process_output_sockets\)$"
# A sample of fewer steps tells more of its edges than of the machine.
MIN_STEPS = 20
MIN_SAMPLES = 10
# A trial on a machine that is so many times slower than usual is another experiment:
# the server may not keep up with its load.
MOST = 1.5


@dataclass(frozen=True)
class Control:
    """Time of the control per step in each sample of a trial, (samples,).

    `ends` are the samples' last steps, `batch` their mean batch sizes.
    """

    ends: Ints
    batch: Floats
    us: Floats


def read_control(steps: pl.DataFrame, threads: pl.DataFrame) -> Control | None:
    """Read the control of a trial from its steps and threads; None without one."""
    own = pl.col("thread").str.contains(CONTROL)
    samples = threads.filter(own, pl.col("steps") >= MIN_STEPS).sort("step_id")
    if samples.height < MIN_SAMPLES:
        return None
    ends = samples["step_id"].to_numpy()
    sample = _sample_of(ends, steps)
    count = np.bincount(sample, minlength=len(ends))
    total = np.bincount(sample, steps["batch"].to_numpy(), minlength=len(ends))
    batch = np.where(
        count > 0, total / np.maximum(count, 1), number(steps["batch"].mean())
    )
    return Control(ends, batch, np.maximum(samples["us_per_step"].to_numpy(), 1e-3))


def too_slow(controls: Sequence[Control | None]) -> list[float | None]:
    """Return how many times slower than usual each trial was, None up to MOST.

    So leaving such trials out favours no config.
    """
    times = times_usual(controls)
    return [one if one is not None and one > MOST else None for one in times]


def times_usual(controls: Sequence[Control | None]) -> list[float | None]:
    """Compute how many times slower than usual each trial was; None without control.

    Usual is what the run's trials take at that batch size: a connector that makes steps
    longer makes batches larger, too, and is not a slow machine.
    """
    known = [control for control in controls if control is not None]
    if not known:
        return [None] * len(controls)
    usual_us = _usual_us(known)
    ratios = [np.median(one.us / usual_us(one.batch)) for one in known]
    typical, found = float(np.median(ratios)), iter(ratios)
    return [None if c is None else float(next(found)) / typical for c in controls]


def _sample_of(ends: Ints, steps: pl.DataFrame) -> Ints:
    """Find the sample of each step; steps after the last sample belong to it."""
    sample = np.searchsorted(ends, steps["step_id"].to_numpy())
    return np.minimum(sample, len(ends) - 1)


def _usual_us(controls: Sequence[Control]) -> Callable[[Floats], Floats]:
    """Fit the usual time by batch size."""
    batch = np.concatenate([control.batch for control in controls])
    us = np.concatenate([control.us for control in controls])
    rise, start = least_absolute_line(batch, us)
    # Outputs take longer in a larger batch; a line that says otherwise is a poor one.
    if rise < 0 or start + rise * batch.min() <= 0:
        rise, start = 0.0, float(np.median(us))
    return lambda sizes: start + rise * sizes
