# SPDX-License-Identifier: Apache-2.0
"""Time of decode-only steps by place in the code, from samples of a server.

A sample counts if a decode-only step was under way at its moment. Of such samples, the
share in which a thread was in a function, times the mean of decode-only steps, is what
a step had of it. Each sample stops the process for milliseconds, so it is the mean of
the steps just before and after the sampling. Other threads are shown for the same
moments: what they did meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from kvtax.records import RecordsError
from kvtax.records.stacks import SampledStacks, read_stacks
from kvtax.records.warning import RunWarning, Warn
from kvtax.report.document import Flame, FlameThread
from kvtax.stats.distribution import Ints

Mask = NDArray[np.bool_]

# Fewer do not show much.
FEWEST_MOMENTS = 100


def flames(folder: Path, steps: pl.DataFrame) -> tuple[list[Flame], list[RunWarning]]:
    """Make a flame graph of each sampled process; `steps` are an Instance's."""
    shown, warnings = [], []
    for path in sorted(folder.glob("stacks.*.json")):
        try:
            found = read_stacks(path)
        except RecordsError as error:
            warnings.append(Warn.STACKS_UNREADABLE(path.name, error=error))
            continue
        flame, moments = _flame(found, steps)
        if flame is not None:
            shown.append(flame)
        if moments < FEWEST_MOMENTS:
            warnings.append(Warn.FEW_SAMPLES(path.name, count=moments))
    return shown, warnings


def _flame(found: SampledStacks, steps: pl.DataFrame) -> tuple[Flame | None, int]:
    """Make the flame, None without samples in decode-only steps; count its moments."""
    t_ns = np.array([sample.t_ns for sample in found.samples], np.int64)
    counted, step_us = _in_decode_steps(t_ns, steps)
    moments = _moments(found, counted)
    if not moments:
        return None, 0
    keys = np.array([(one.thread, one.stack) for one in found.samples])[counted]
    pairs, counts = np.unique(keys, axis=0, return_counts=True)
    us_each = step_us / moments
    threads = [
        FlameThread(
            name=found.threads[thread].name,
            stacks=[found.stacks[stack] for stack in pairs[own, 1]],
            us=[round(float(us), 3) for us in counts[own] * us_each],
        )
        for thread in _main_first(found)
        if (own := pairs[:, 0] == thread).any()
    ]
    flame = Flame(
        title=f"In the code of process {found.pid}",
        note=f"{moments:,} samples of decode-only steps. A share of the samples is "
        f"that share of a step of {step_us:,.0f} µs, the mean of those just before and "
        f"after. py-spy {found.py_spy}.",
        frames=found.frames,
        threads=threads,
    )
    return flame, moments


def _moments(found: SampledStacks, counted: Mask) -> int:
    """Count the `counted` samples of the thread that has most of them."""
    threads = [sample.thread for sample in found.samples]
    return int(np.bincount(np.array(threads)[counted], minlength=1).max())


def _in_decode_steps(t_ns: Ints, steps: pl.DataFrame) -> tuple[Mask, float]:
    """Select the moments in decode-only steps; average such steps, in us.

    The mean is of the steps that ran within as long before and after the sampling as
    it took; of those that were sampled, where there are no others.
    """
    decoding = (steps["prefill_tokens"] == 0) & (steps["decode_tokens"] > 0)
    decode: Mask = decoding.fill_null(False).to_numpy()
    if not decode.any() or not len(t_ns):
        return np.zeros(len(t_ns), bool), 0.0
    began, ended = steps["t_ns"].to_numpy(), steps["end_ns"].to_numpy()
    at = np.searchsorted(began, t_ns, "right") - 1
    inside = (at >= 0) & (t_ns < ended[at]) & decode[at]
    first_ns, last_ns = t_ns.min(), t_ns.max()
    took_ns = last_ns - first_ns
    sampled = decode & (ended >= first_ns) & (began <= last_ns)
    near = decode & (ended >= first_ns - took_ns) & (began <= last_ns + took_ns)
    beside = near & ~sampled
    step_us = steps["step_us"].to_numpy()[beside if beside.any() else sampled]
    return inside, float(step_us.mean()) if len(step_us) else 0.0


def _main_first(found: SampledStacks) -> list[int]:
    """List places in `threads`, first the thread that steps run in."""
    names = [thread.name for thread in found.threads]
    return sorted(range(len(names)), key=lambda place: names[place] != "MainThread")
