# SPDX-License-Identifier: Apache-2.0
"""A profile is measured as this machine takes it, or all reasons against are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from kvtax.engine import gpus
from kvtax.engine.preflight import PreflightError
from kvtax.paths import REPOSITORY
from microbench.machine_fit import choices, fitted
from microbench.profile import load_profile
from tests.fake_gpu import H100, path_with_gpus


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU of so much memory, and an RDMA port if asked for."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def has(memory_mib: int, rdma: bool = False) -> None:
        line = H100.replace("81559", str(memory_mib))
        monkeypatch.setenv("PATH", path_with_gpus(tmp_path, line))
        state = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "state"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text("4: ACTIVE" if rdma else "1: DOWN")
        monkeypatch.setattr(gpus, "INFINIBAND", tmp_path / "infiniband")

    return has


def protocols(profile) -> set[str]:
    told = (each.kv_transfer_config or {} for each in profile.connectors().values())
    extra = (transfer.get("kv_connector_extra_config", {}) for transfer in told)
    return {each["mooncake_protocol"] for each in extra if each}


@pytest.mark.parametrize(
    ("memory_mib", "layers"), [(24564, 10), (49140, 24), (81559, 41), (143771, 48)]
)
def test_what_was_chosen_is_served_and_recorded(machine, memory_mib, layers, tmp_path):
    machine(memory_mib)
    profile = fitted(load_profile("gpu"))
    # This is what run.json holds.
    record = msgspec.to_builtins(profile)
    assert (record["layers"], record["num_blocks"]) == (layers, 18_000)
    folder = profile.checkpoint(tmp_path / "model").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == layers
    assert f"{layers} layers and 18000 blocks" in choices(profile)[0]


def test_a_card_that_is_too_small_is_refused(machine):
    machine(4096)
    with pytest.raises(PreflightError, match="4 GiB of GPU memory"):
        fitted(load_profile("gpu"))


def test_real_weights_are_not_cut(machine, tmp_path):
    machine(24564)
    model = tmp_path / "model"
    shape = load_profile("gpu").checkpoint(model).folder / "config.json"
    (model / "part.safetensors").touch()
    whole = json.loads(shape.read_text())["num_hidden_layers"]
    given = msgspec.structs.replace(load_profile("gpu"), model=str(model))
    profile = fitted(given)
    assert profile.layers == whole
    assert profile.num_blocks < given.num_blocks
    assert profile.checkpoint(tmp_path / "elsewhere").folder == model


def test_mooncake_goes_over_rdma_where_there_is_rdma(machine):
    machine(81559, rdma=True)
    profile = fitted(load_profile("gpu"))
    assert protocols(profile) == {"rdma"}
    machine(81559)
    profile = fitted(load_profile("gpu"))
    assert protocols(profile) == {"tcp"}
    assert "no RDMA port is up" in choices(profile)[1]


def test_a_profile_of_the_cpus_is_left_as_it_is(machine):
    machine(24564, rdma=True)
    profile = load_profile("cpu")
    assert fitted(profile) == profile
    assert protocols(profile) == {"tcp"}
    assert choices(profile) == []


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvtax", "sweep", "--check", *arguments],
        cwd=REPOSITORY,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_machine_that_can_measure_is_said_to(tmp_path):
    runs = REPOSITORY / "runs"
    before = set(runs.glob("*"))
    done = check("--profile", "cpu-smoke", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "cpu-smoke can be measured here" in done.stdout
    assert set(runs.glob("*")) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_all_reasons_are_said_at_once(tmp_path):
    path = path_with_gpus(tmp_path, "0, Tesla V100, 4096, 3000, 470.82.01, 7.0")
    done = check("--profile", "gpu", PATH=path)
    assert done.returncode == 3
    reasons = done.stderr
    assert "profile gpu cannot be measured here" in reasons
    assert "4 GiB of GPU memory" in reasons
    assert "3000 of 4096 MiB are in use" in reasons
    assert "no bfloat16" in reasons
    assert "driver 470.82.01 is too old" in reasons
    assert "vLLM for GPUs is not installed: run bash setup.sh gpu" in reasons


@pytest.mark.slow
def test_what_keeps_vllm_from_being_tried_is_said_like_the_rest(tmp_path):
    (tmp_path / "libtcmalloc_minimal.so.4").touch()
    done = check("--only", "plain", "--only", "noop", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 3
    (reason,) = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    assert "setup.sh" in reason and "libtcmalloc_minimal.so.4" in reason


@pytest.mark.slow
def test_what_stops_several_configs_is_said_once(tmp_path):
    # The writes of Mooncake's check need this library.
    (tmp_path / "libibverbs.so.1").touch()
    both = ("--only", "mooncake_both", "--only", "mooncake_producer")
    done = check(*both, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 3
    (reason,) = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    assert reason.startswith("  - mooncake_both, mooncake_producer: ")
