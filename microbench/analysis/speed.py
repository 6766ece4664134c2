# SPDX-License-Identifier: Apache-2.0
"""How slow the machine is, read off work that no connector has a part in.

A shared machine is faster or slower for seconds at a time, up to twice, which tilts a
slope as growth would. vLLM's thread that packs and sends the outputs does the same for
every token, runs none of a connector's code, and waits for none of it in CPU time. What
it takes per step is how slow the machine was then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from lab.stats.estimate import Floats

CONTROL = r"\(process_output_sockets\)$"
# A sample of fewer steps tells more of its edges than of the machine.
MIN_STEPS = 20
MIN_SAMPLES = 10
# A trial on a machine that is so many times slower than usual is another experiment:
# the server may not keep up with its load.
MOST = 1.5


def with_slowness(steps: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """`steps` with the column slowness, 1 at the trial's usual speed, 2 at half of it.

    `threads` is the trial's table of threads. Outputs take longer in a larger batch, so
    each sample is compared with what is usual for its batch size, by a straight line.
    Without samples the slowness is 1.
    """
    control = _control(threads)
    if control.height < MIN_SAMPLES:
        return steps.with_columns(pl.lit(1.0).alias("slowness"))
    ends = control["step_id"].to_numpy()
    sample = np.searchsorted(ends, steps["step_id"].to_numpy())
    sample = np.minimum(sample, len(ends) - 1)
    batch = _mean_by(sample, steps["batch"].to_numpy(), len(ends))
    slowness = _beside_line(batch, control["us_per_step"].to_numpy())
    return steps.with_columns(pl.Series("slowness", slowness[sample]))


def _control(threads: pl.DataFrame) -> pl.DataFrame:
    own = pl.col("thread").str.contains(CONTROL)
    return threads.filter(own, pl.col("steps") >= MIN_STEPS).sort("step_id")


def _mean_by(sample: Floats, values: Floats, samples: int) -> Floats:
    """Mean of `values` in each sample, that of all where one has none."""
    count = np.bincount(sample, minlength=samples)
    total = np.bincount(sample, values, minlength=samples)
    return np.where(count > 0, total / np.maximum(count, 1), values.mean())


def _beside_line(batch: Floats, us: Floats) -> Floats:
    """`us` over what is usual at that batch size; the median of it is 1."""
    rise, start = np.polyfit(batch, us, 1)
    usual = start + rise * batch
    # A line through few batch sizes may be a poor one.
    if not (rise >= 0 and (usual > 0).all()):
        usual = np.full(len(us), np.median(us))
    ratio = np.maximum(us, 1e-3) / usual
    return ratio / np.median(ratio)


def control_us(threads: pl.DataFrame) -> float | None:
    """What the control takes per step in a trial, in us; None without samples."""
    taken = _control(threads)["us_per_step"]
    return float(taken.median()) if len(taken) >= MIN_SAMPLES else None


def too_slow(controls_us: Sequence[float | None]) -> list[float | None]:
    """How many times slower than usual each trial was, if more than MOST; else None.

    Usual is the median of a run's trials. The control tells nothing of the connector,
    so leaving such trials out favours no config.
    """
    known = [us for us in controls_us if us is not None]
    usual = float(np.median(known)) if known else 1.0
    times = [None if us is None else us / usual for us in controls_us]
    return [one if one is not None and one > MOST else None for one in times]
