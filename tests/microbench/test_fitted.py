# SPDX-License-Identifier: Apache-2.0
"""The gpu profile is measured as this machine's GPU and network take it."""

from __future__ import annotations

import json

import msgspec
import pytest

from lab.serving import gpus
from lab.serving.preflight import PreflightError
from microbench.fitted import choices, fitted
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
