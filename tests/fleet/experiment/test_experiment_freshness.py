# SPDX-License-Identifier: Apache-2.0
"""A run counts only if its instances began with cold caches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from small_experiment import experiment

from fleet.experiment.arm import evidence_before_start
from fleet.experiment.config import Given
from fleet.experiment.freshness import COUNTERS, counted, judge
from fleet.experiment.plan import plan
from fleet.experiment.prepare import planned_arm
from lab.paths import CONFIGS
from lab.records.arm import Freshness, TraceFacts
from tests.fake_gpu import H100, path_with_gpus


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


def test_an_instance_that_has_served_nothing_is_fresh():
    assert judged().fresh
    assert judged().why is None


@pytest.mark.parametrize("name", [*COUNTERS, "vllm:kv_cache_usage_perc"])
def test_an_instance_that_has_served_anything_is_not_fresh(name):
    text = metrics(**{name.removeprefix("vllm:"): 3.0})
    evidence = judged(instances={"i0": counted(metrics()), "i1": counted(text)})
    assert not evidence.fresh
    assert name in evidence.why
    assert "i1" in evidence.why


def test_what_cannot_be_seen_is_not_taken_for_fresh():
    assert not judged(instances={}).fresh
    assert "missing" in judged(instances={"i0": {}}).why


def test_a_first_step_that_finds_blocks_is_not_fresh():
    assert judged(first_step_cached_blocks={"i0": 0}).fresh
    assert "found 5 blocks" in judged(first_step_cached_blocks={"i0": 5}).why


def test_a_gpu_that_somebody_uses_is_not_fresh():
    assert judged(gpu_used_mib=[3, 500]).fresh
    assert "GPU 1: 9000 MiB" in judged(gpu_used_mib=[3, 9000]).why


def test_what_an_earlier_run_left_running_is_not_fresh():
    assert judged(survivors=[]).fresh
    assert "earlier run are still there: [77]" in judged(survivors=[77]).why


def before(**source) -> Freshness:
    """What is seen before a run of two instances of this `source`."""
    two = experiment(**({"standin": None, "instances": 2} | source))
    facts = TraceFacts("t", "", "t", 1, 1, 1, 1)
    return evidence_before_start(planned_arm(two, plan(two)[0], facts, {}), two)


@pytest.fixture
def used_gpus(tmp_path, monkeypatch) -> Path:
    """Three GPUs, all in use; the folder of their profile."""
    lines = [
        H100.replace("0, ", f"{index}, ", 1).replace(" 4,", f" {used_mib},")
        for index, used_mib in enumerate((9000, 5, 8000))
    ]
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, *lines))
    text = (CONFIGS / "fleet" / "h20-30b-a3b.toml").read_text()
    on_gpus = text.replace('flavour = "cpu"', 'flavour = "gpu"')
    (tmp_path / "gpu.toml").write_text(on_gpus)
    return tmp_path


def test_gpus_matter_where_instances_are_started_on_them_and_only_those(used_gpus):
    assert before(profile=f"{used_gpus}/gpu").gpu_used_mib == [9000, 5]
    assert before(profile="h20-30b-a3b").gpu_used_mib is None
    assert before(given=Given("x", ["true"])).gpu_used_mib is None
    assert before(standin=[]).gpu_used_mib is None


def test_a_process_that_outlived_its_run_is_seen_before_the_next():
    assert before(standin=[]).survivors == []
    with subprocess.Popen(["sleep", "60"]) as left:
        assert before(standin=[]).survivors == [left.pid]
        assert before(given=Given("x", ["true"])).survivors is None
        left.kill()
