# SPDX-License-Identifier: Apache-2.0
"""Could this machine keep up with what it simulates? If not, the run says nothing.

There are three signs:
- how busy the cores were;
- how late the engines woke from the sleep that stands for their forward: a machine with
  a core to spare wakes them within a fraction of a millisecond;
- how much longer their steps took than that forward. The rest of a step is the engine's
  and the connector's own work. That work is there on a GPU too, but a machine that runs
  four engines, the proxy and the load at once may inflate it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

from fleet.launch.launched import FORWARD_TOTALS
from lab.records.arm import EngineLag, MachineLoad
from lab.records.step_table import read_steps
from lab.records.steps import EngineHeader
from lab.serving.supervise import Supervised, descendants

BUSY_LIMIT = 0.9
# Shares of the simulated forward, over a run. Beside steps of 5 to 10 ms a machine with
# a core to spare is 0.01 late, and vLLM's own work comes to 0.05 to 0.15.
LATE_LIMIT = 0.05
EXCESS_LIMIT = 0.5
SAMPLE_S = 1.0


class CpuSampler:
    """Samples how busy the cores are, from entering to leaving its context."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._samples: list[tuple[int, int]] = []
        self._pressure_us: list[int | None] = []
        self._times_s: list[float] = []
        self._own_s: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuSampler:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()

    def busy(self) -> tuple[float, float]:
        """Mean and p99 of the share of the cores that was busy."""
        busy, total = np.diff(np.array(self._samples), axis=0).T
        known = total > 0
        shares = busy[known] / total[known]
        return float(busy.sum() / total.sum()), float(np.quantile(shares, 0.99))

    def busy_own(self, cores: int) -> float:
        """The share of the cores that this process and those below it took."""
        return (self._own_s[1] - self._own_s[0]) / self._took_s() / cores

    def waiting(self) -> float | None:
        before, after = self._pressure_us
        if before is None or after is None:
            return None
        return (after - before) / 1e6 / self._took_s()

    def _took_s(self) -> float:
        return self._times_s[1] - self._times_s[0]

    def _run(self) -> None:
        self._samples.append(_cpu_ticks())
        while not self._done.wait(SAMPLE_S):
            self._samples.append(_cpu_ticks())
        self._samples.append(_cpu_ticks())

    def _note(self) -> None:
        self._times_s.append(time.monotonic())
        self._pressure_us.append(_pressure_us())
        self._own_s.append(_own_cpu_s())


def machine_load(
    sampler: CpuSampler, cores: int, engines: dict[str, EngineLag]
) -> MachineLoad:
    mean, p99 = sampler.busy()
    late = excess = None
    if simulated_s := sum(lag.simulated_s for lag in engines.values()):
        late = sum(lag.slept_s for lag in engines.values()) / simulated_s - 1
        excess = sum(lag.step_s for lag in engines.values()) / simulated_s - 1
    why = []
    if mean > BUSY_LIMIT:
        why.append(f"{mean:.0%} of the cores were busy, more than {BUSY_LIMIT:.0%}")
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
        busy_mean=mean,
        busy_p99=p99,
        busy_own=sampler.busy_own(cores),
        waiting=sampler.waiting(),
        engines=engines,
        engine_late=late,
        engine_excess=excess,
        saturated="; ".join(why) or None,
    )


def engine_lags(folders: dict[str, Path]) -> dict[str, EngineLag]:
    """Of the instances that simulate, by name, from the folders of all.

    Raises RecordsError.
    """
    lags = {
        name: engine_lag(folder / "engine_step.jsonl", folder / FORWARD_TOTALS)
        for name, folder in folders.items()
    }
    return {name: lag for name, lag in lags.items() if lag is not None}


@contextmanager
def gpu_sampler(folder: Path) -> Iterator[None]:
    """Writes `gpu.csv` in `folder` meanwhile, where there is nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    command = [sys.executable, "-m", "fleet.experiment.gpu_sampler"]
    command += ["--out", str(folder / "gpu.csv")]
    with Supervised(command, dict(os.environ), folder / "gpu_sampler.log"):
        yield


def engine_lag(records: Path, totals: Path) -> EngineLag | None:
    """Of one instance, from its engine_step.jsonl and the null model's totals.

    None where the instance is not one that simulates. Raises RecordsError.
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
        step_s=ran_us.cast(pl.Float64).sum() / 1e6,
        simulated_s=simulated_ns / 1e9,
        slept_s=slept_ns / 1e9,
    )


def _cpu_ticks() -> tuple[int, int]:
    """(busy, total) of all cores since boot; a stolen core was not to be had."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[:8])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _own_cpu_s() -> float:
    """CPU time of this process and all below it, those that have ended included."""
    ticks = 0
    for pid in descendants(os.getpid()):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        # utime, stime, cutime and cstime, counted from behind the name.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def _pressure_us() -> int | None:
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    except OSError:
        return None
    return int(some.rpartition("total=")[2])
