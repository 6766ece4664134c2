# SPDX-License-Identifier: Apache-2.0
"""Load of a machine: simulated forwards it kept up with, and its GPUs.

A run on a machine that did not keep up is not valid. There are three signs:
- the share of the cores that was busy;
- the delay with which engines woke from the sleep that stands for their forward: a
  machine with a core to spare wakes them within a fraction of a millisecond;
- the time that their steps took beyond that forward. The rest of a step is the engine's
  and the connector's own work. That work is there on a GPU too, but a machine that runs
  four engines, the proxy and the load at once may inflate it.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import psutil
from kvtax.proc.supervise import PR_SET_PDEATHSIG
from kvtax.records.steps import STEPS, EngineHeader, only_life
from kvtax.steps.step_file import read_steps

from kvtax_fleet.launch.launched import FORWARD_TOTALS
from kvtax_fleet.records.arm import EngineLag, MachineLoad

BUSY_LIMIT = 0.9
# Shares of the simulated forward, over a run. Beside steps of 5 to 10 ms a machine with
# a core to spare is 0.01 late, and vLLM's own work comes to 0.05 to 0.15.
LATE_LIMIT = 0.05
EXCESS_LIMIT = 0.5
GPU_SAMPLE_MS = 500
# Columns of gpu.csv behind the time, by the field of nvidia-smi.
GPU_FIELDS = {
    "index": "gpu",
    "utilization.gpu": "utilization_percent",
    "memory.used": "memory_used_mib",
    "power.draw": "power_w",
    "clocks.sm": "sm_clock_mhz",
}
GPU_HEADER = ",".join(("monotonic_ns", *GPU_FIELDS.values()))


class CoreTimes(NamedTuple):
    """Seconds of all cores since boot; stolen time is busy."""

    busy_s: float
    total_s: float

    @classmethod
    def now(cls) -> CoreTimes:
        """Read them."""
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system
        busy_s += times.irq + times.softirq + times.steal
        return cls(busy_s, busy_s + times.idle + times.iowait)

    def busy_since(self, before: CoreTimes) -> float:
        """Compute the share of the cores that was busy."""
        total_s = max(self.total_s - before.total_s, 1e-9)
        return min(1.0, (self.busy_s - before.busy_s) / total_s)


def machine_load(busy: float, cores: int, engines: dict[str, EngineLag]) -> MachineLoad:
    """Judge the busy share of the cores and the engines' lags."""
    late = excess = None
    if simulated_s := sum(lag.simulated_s for lag in engines.values()):
        late = sum(lag.slept_s for lag in engines.values()) / simulated_s - 1
        excess = sum(lag.step_s for lag in engines.values()) / simulated_s - 1
    why = []
    if busy > BUSY_LIMIT:
        why.append(f"{busy:.0%} of the cores were busy, more than {BUSY_LIMIT:.0%}")
    if late is not None and late > LATE_LIMIT:
        why.append(
            f"forwards took {late:.0%} longer than simulated, more than "
            f"{LATE_LIMIT:.0%}: raise `time_factor`"
        )
    if excess is not None and excess > EXCESS_LIMIT:
        why.append(
            f"engine steps took {excess:.0%} longer than their simulated forward, "
            f"more than {EXCESS_LIMIT:.0%}: raise `time_factor`"
        )
    return MachineLoad(
        cores=cores,
        busy_mean=busy,
        engines=engines,
        engine_late=late,
        engine_excess=excess,
        saturated="; ".join(why) or None,
    )


def engine_lags(folders: dict[str, Path]) -> dict[str, EngineLag]:
    """Read the lags of the instances that simulate a forward, from all folders by name.

    Raises RecordsError.
    """
    lags = {
        name: engine_lag(only_life(folder) / STEPS, folder / FORWARD_TOTALS)
        for name, folder in folders.items()
    }
    return {name: lag for name, lag in lags.items() if lag is not None}


@contextmanager
def gpu_sampler(out: Path) -> Iterator[None]:
    """Sample the GPUs into the CSV file `out` meanwhile, where there is nvidia-smi.

    One row per GPU and sample, with the time of CLOCK_MONOTONIC so that rows join the
    requests. A field that the GPU does not report is empty.
    """
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        yield
        return
    command = [nvidia_smi, f"--query-gpu={','.join(GPU_FIELDS)}"]
    command += ["--format=csv,noheader,nounits", f"--loop-ms={GPU_SAMPLE_MS}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
    ) as process:
        assert process.stdout is not None
        rows = threading.Thread(target=_write_gpu_rows, args=(process.stdout, out))
        rows.start()
        try:
            yield
        finally:
            if (status := process.poll()) is not None:
                print(f"nvidia-smi ended with status {status}: {out} ends early")
            process.terminate()
            rows.join()


def _write_gpu_rows(lines: Iterable[str], out: Path) -> None:
    with out.open("w", buffering=1) as file:
        print(GPU_HEADER, file=file)
        for line in lines:
            if row := gpu_row(time.monotonic_ns(), line):
                print(row, file=file)


def gpu_row(now_ns: int, line: str) -> str | None:
    """Make a CSV row from a line of nvidia-smi, None if the line has other fields."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(GPU_FIELDS) or not values[0].isdigit():
        return None
    known = ["" if value.startswith("[") else value for value in values]
    return ",".join((str(now_ns), *known))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def engine_lag(records: Path, totals: Path) -> EngineLag | None:
    """Read one instance's lag from its engine_step.jsonl and the null model's totals.

    None for an instance that simulates no forward. Raises RecordsError.
    """
    if not (records.exists() and totals.exists()):
        return None
    steps = read_steps(records, EngineHeader, ("step_id", "scheduled", "step_us"))
    ran = steps.frame.filter(pl.col("scheduled") > 0, pl.col("step_us") > 0)
    ran_us = ran["step_us"]
    forwards, simulated_ns, slept_ns = np.fromfile(totals, np.int64).tolist()
    if not forwards or ran_us.is_empty():
        return None
    return EngineLag(
        steps=len(ran_us),
        step_s=float(ran_us.cast(pl.Float64).sum()) / 1e6,
        simulated_s=simulated_ns / 1e9,
        slept_s=slept_ns / 1e9,
    )
