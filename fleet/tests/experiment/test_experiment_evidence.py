# SPDX-License-Identifier: Apache-2.0
"""A run counts if its caches began cold and its machine kept up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kvtax.records.files import LineFile
from kvtax.records.steps import EngineHeader, EngineStep
from tests.proc.living import content, eventually, gone

from kvtax_fleet.experiment.freshness import COUNTERS, counted, judge
from kvtax_fleet.experiment.machine import (
    GPU_HEADER,
    CoreTimes,
    engine_lag,
    gpu_row,
    gpu_sampler,
    machine_load,
)
from kvtax_fleet.records.arm import EngineLag, Freshness


def metrics(**values: float) -> str:
    counters = dict.fromkeys(COUNTERS, 0.0) | {
        f"vllm:{name}": value for name, value in values.items()
    }
    rows = []
    for name, value in counters.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append(f"# TYPE {name.removesuffix('_total')} {kind}")
        rows.append(f'{name}{{engine="0"}} {value}')
    return "\n".join(rows) + "\n"


def judged(**fields) -> Freshness:
    evidence = Freshness(**({"instances": {"i0": counted(metrics())}} | fields))
    judge(evidence)
    return evidence


@pytest.mark.parametrize("name", [*COUNTERS, "vllm:kv_cache_usage_perc"])
def test_an_instance_that_has_served_anything_is_not_fresh(name):
    text = metrics(**{name.removeprefix("vllm:"): 3.0})
    evidence = judged(instances={"i0": counted(metrics()), "i1": counted(text)})
    assert not evidence.fresh
    assert name in evidence.why
    assert "i1" in evidence.why


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        ({}, None),
        ({"instances": {}}, "no instance was looked at"),
        ({"instances": {"i0": {}}}, "i0: vllm:prompt_tokens_total is missing"),
        ({"first_step_cached_blocks": {"i0": 0}}, None),
        ({"first_step_cached_blocks": {"i0": 5}}, "found 5 blocks"),
        ({"gpu_used_mib": [3, 500]}, None),
        ({"gpu_used_mib": [3, 9000]}, "GPU 1: 9000 MiB"),
        ({"survivors": []}, None),
        ({"survivors": [77]}, "earlier run are still there: [77]"),
    ],
)
def test_only_what_is_seen_to_have_nothing_of_before_is_fresh(evidence, why):
    seen = judged(**evidence)
    assert seen.fresh == (seen.why is None) == (why is None)
    assert why is None or why in seen.why


def lag(late: float, excess: float) -> EngineLag:
    return EngineLag(steps=10, step_s=1 + excess, simulated_s=1.0, slept_s=1 + late)


@pytest.mark.parametrize(
    ("busy", "late", "excess", "signs"),
    [
        (0.89, 0.049, 0.49, []),
        (0.91, 0, 0, ["cores were busy"]),
        (0.1, 0.051, 0, ["longer than simulated"]),
        (0.1, 0, 0.51, ["longer than their simulated forward"]),
        (0.91, 0.051, 0, ["cores were busy", "longer than simulated"]),
    ],
)
def test_each_sign_of_a_machine_that_does_not_keep_up_makes_a_run_invalid(
    busy, late, excess, signs
):
    seen = machine_load(busy, 2, {"i0": lag(late, excess)})
    assert seen.busy_mean == pytest.approx(busy)
    assert seen.engine_late == pytest.approx(late)
    assert seen.engine_excess == pytest.approx(excess)
    reasons = (seen.saturated or "").split("; ") if seen.saturated else []
    assert len(reasons) == len(signs)
    assert all(sign in reason for sign, reason in zip(signs, reasons, strict=True))


def test_lags_are_shares_of_the_forwards_of_all_engines_together():
    engines = {
        "i0": EngineLag(steps=1, step_s=4.0, simulated_s=2.0, slept_s=2.2),
        "i1": EngineLag(steps=1, step_s=8.0, simulated_s=6.0, slept_s=6.0),
    }
    seen = machine_load(0.1, 2, engines)
    # 12 s of steps and 8.2 s of sleep in the place of 8 s of forwards.
    assert seen.engine_excess == pytest.approx(0.5)
    assert seen.engine_late == pytest.approx(0.025)
    alone = machine_load(0.1, 2, {})
    assert (alone.engine_late, alone.engine_excess) == (None, None)


@pytest.mark.slow
def test_a_machine_is_as_busy_as_its_cores_say():
    assert CoreTimes(7, 10).busy_since(CoreTimes(1, 2)) == pytest.approx(0.75)
    before = CoreTimes.now()
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = CoreTimes.now()
    assert after.busy_s - before.busy_s > 0.4
    assert 0 < after.busy_since(before) <= 1


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


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Make a pretended nvidia-smi of a script; its pid is in the file `pid`."""

    def pretend(script: str) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return pretend


def test_without_nvidia_smi_no_gpu_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpu_sampler(tmp_path / "gpu.csv"):
        pass
    assert not (tmp_path / "gpu.csv").exists()


@pytest.mark.slow
def test_gpu_samples_have_our_time_and_nvidia_smi_ends_with_them(tmp_path, nvidia_smi):
    rows = "0, 97, 40000, 412.5, 1980\n1, [N/A], 12, [N/A], 300"
    # It goes on without writing, so that no broken pipe ends it for us.
    nvidia_smi(f"echo '{rows}'; echo '{rows}'; exec sleep 600")
    out = tmp_path / "gpu.csv"
    began = time.monotonic_ns()
    with gpu_sampler(out):
        eventually(lambda: out.exists() and out.read_text().count("\n") >= 5)
    tool = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{tool}").exists()
    text = out.read_text().splitlines()
    assert text[0] == GPU_HEADER
    first, second = text[1].split(","), text[2].split(",")
    assert began < int(first[0]) < time.monotonic_ns()
    assert first[1:] == ["0", "97", "40000", "412.5", "1980"]
    assert second[1:] == ["1", "", "12", "", "300"]


@pytest.mark.slow
def test_an_nvidia_smi_that_ends_by_itself_is_reported(tmp_path, nvidia_smi, capsys):
    nvidia_smi("exit 9")
    with gpu_sampler(tmp_path / "gpu.csv"):
        tool = int(content(tmp_path / "pid"))
        eventually(lambda: gone([tool]))
    assert "status 9" in capsys.readouterr().out


def test_a_line_that_is_no_gpu_sample_is_left_out():
    assert gpu_row(1, "NVIDIA-SMI has failed, because\n") is None
