# SPDX-License-Identifier: Apache-2.0
"""A run is not valid on a machine that could not keep up with it."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from fleet.experiment.machine import (
    BUSY_LIMIT,
    EXCESS_LIMIT,
    LATE_LIMIT,
    CpuSampler,
    engine_lag,
    machine_load,
)
from lab.records.arm import EngineLag
from lab.records.line_file import LineFile
from lab.records.steps import EngineHeader, EngineStep


def sampled(busy: float) -> CpuSampler:
    with CpuSampler() as sampler:
        pass
    sampler._samples = [(0, 0), (int(1000 * busy), 1000)]
    return sampler


def lag(late: float, excess: float) -> EngineLag:
    return EngineLag(steps=10, step_s=1 + excess, simulated_s=1.0, slept_s=1 + late)


def test_a_machine_that_keeps_up_is_not_saturated():
    found = machine_load(sampled(BUSY_LIMIT - 0.05), 2, {"i0": lag(0.01, 0.05)})
    assert found.saturated is None
    assert found.engine_excess == pytest.approx(0.05)
    assert found.engine_late == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("busy", "late", "excess", "what"),
    [
        (BUSY_LIMIT + 0.05, 0, 0, "cores were busy"),
        (0.1, LATE_LIMIT + 0.02, 0, "longer than simulated"),
        (0.1, 0, EXCESS_LIMIT + 0.1, "longer than their simulated forward"),
    ],
)
def test_each_sign_of_a_machine_that_does_not_keep_up_makes_a_run_invalid(
    busy, late, excess, what
):
    found = machine_load(sampled(busy), 2, {"i0": lag(late, excess)})
    assert what in found.saturated


@pytest.mark.slow
def test_a_core_that_a_child_keeps_busy_is_seen_and_is_our_own():
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    with CpuSampler() as sampler:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", spin], check=True)
        took_s = time.monotonic() - began
    assert 0 < sampler.busy()[0] <= 1
    assert sampler.busy_own(cores=1) >= 0.9 * 0.5 / took_s


def test_the_lag_of_an_engine_is_over_its_steps_that_ran_a_forward(tmp_path):
    records, totals = tmp_path / "engine_step.jsonl", tmp_path / "totals"
    with LineFile(records, EngineHeader()) as file:
        for step_id, (scheduled, step_us) in enumerate([(2, 6e3), (0, 50.0), (1, 5e3)]):
            step = EngineStep(step_id, step_id, scheduled=scheduled, step_us=step_us)
            file.append(step)
        # Scheduled when the engine was stopped, and never updated.
        file.append(EngineStep(3, 3, scheduled=1))
    assert engine_lag(records, totals) is None
    np.array([2, 10_000_000, 10_400_000], np.int64).tofile(totals)
    assert engine_lag(records, totals) == EngineLag(2, 0.011, 0.01, 0.0104)


def test_an_engine_that_ran_no_forward_has_no_lag(tmp_path):
    records, totals = tmp_path / "engine_step.jsonl", tmp_path / "totals"
    with LineFile(records, EngineHeader()) as file:
        file.append(EngineStep(0, 0, scheduled=0, step_us=50.0))
    np.zeros(3, np.int64).tofile(totals)
    assert engine_lag(records, totals) is None
