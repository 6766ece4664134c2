# SPDX-License-Identifier: Apache-2.0
"""A profile is measured as this machine takes it, or all reasons against are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.cli import main
from kvtax.engine import gpus, preflight
from kvtax.engine.gpus import gpu_problems, has_rdma
from kvtax.engine.preflight import PreflightError
from kvtax.paths import CONFIGS, REPOSITORY
from microbench.machine_fit import (
    LEAST_BLOCKS,
    DoesNotFit,
    choices,
    embedding_bytes,
    fit_shape,
    fit_weights,
    fitted,
    kv_bytes_per_token_and_layer,
    layer_bytes,
    usable_bytes,
)
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
    given = (each.kv_transfer_config or {} for each in profile.connectors().values())
    extra = (transfer.get("kv_connector_extra_config", {}) for transfer in given)
    return {each["mooncake_protocol"] for each in extra if each}


@pytest.mark.parametrize(("memory_mib", "layers"), [(24564, 10), (143771, 48)])
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
def test_all_reasons_are_said_at_once(tmp_path, monkeypatch, capsys):
    gpu = "0, Tesla V100, 4096, 3000"
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, gpu))
    monkeypatch.setattr(preflight, "check_import", lambda *_: None)
    assert main(["sweep", "--check", "--profile", "gpu", "--only", "plain"]) == 3
    reasons = capsys.readouterr().err
    assert "profile gpu cannot be measured here" in reasons
    assert "4 GiB of GPU memory" in reasons
    assert "3000 of 4096 MiB are in use" in reasons
    assert "vLLM for GPUs is not installed: run bash setup.sh gpu" in reasons


@pytest.mark.slow
def test_what_stops_vllm_and_what_stops_several_configs_is_said_once_each(tmp_path):
    # vLLM's server needs the one, Mooncake's engine the other.
    for library in ("libtcmalloc_minimal.so.4", "libibverbs.so.1"):
        (tmp_path / library).touch()
    both = ("--only", "mooncake_both", "--only", "mooncake_producer")
    done = check(*both, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 3
    of_vllm, of_both = [e for e in done.stderr.splitlines() if e[:4] == "  - "]
    assert "setup.sh" in of_vllm and "libtcmalloc_minimal.so.4" in of_vllm
    assert of_both.startswith("  - mooncake_both, mooncake_producer: ")
    assert "libibverbs.so.1" in of_both


OLD = "0, Tesla V100, 16384, 9000"
UNKNOWN = "0, NVIDIA GB10, [N/A], [N/A]"
BUSY, SECOND = H100.replace(", 4", ", 70000"), H100.replace("0, ", "1, ", 1)
# What nvidia-smi prints or does, what is asked for, and all that stands against it.
MACHINES = [
    ([H100], {}, []),
    ([OLD], {}, ["9000 of 16384 MiB are in use"]),
    ([H100], {"servers": 2}, ["2 server(s) need a GPU each, and 1"]),
    ([H100, BUSY], {"servers": 2}, ["in use"]),
    ([H100, BUSY], {}, []),
    ([H100, SECOND], {"workers": 2}, []),
    ([H100, SECOND], {"servers": 2, "workers": 2},
     ["2 server(s) need 2 GPUs each, and 2 can be seen"]),
    ("echo could not talk to it; exit 9", {}, ["status 9", "could not talk to it"]),
    ([UNKNOWN], {}, ["not understood"]),
    ("true", {}, ["this profile needs a GPU"]),
    ("echo No devices were found", {}, ["this profile needs a GPU"]),
]  # fmt: skip


@pytest.mark.parametrize(("smi", "needs", "problems"), MACHINES)
def test_all_that_gpus_lack_is_said_at_once(
    smi, needs, problems, tmp_path, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines, script = ([], smi) if isinstance(smi, str) else (smi, "")
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, *lines, script=script))
    shown = "\n".join(gpu_problems(**{"servers": 1, "workers": 1} | needs))
    assert all(problem in shown for problem in problems)
    assert bool(shown) == bool(problems)


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    (said,) = gpu_problems(1)
    assert "no nvidia-smi" in said


def test_only_the_gpu_that_a_server_will_use_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    script = f'[ "$3" = --id=3 ] && echo "{H100}"'
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, script=script))
    assert list(gpu_problems(1)) == []


@pytest.mark.parametrize(
    ("state", "up"), [("4: ACTIVE\n", True), ("1: DOWN\n", False), (None, False)]
)
def test_rdma_is_there_where_a_port_is_up(state, up, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "INFINIBAND", tmp_path)
    if state:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert has_rdma() is up


QWEN = json.loads((CONFIGS / "models" / "qwen3-coder-30b-a3b.json").read_text())
GIB = 2**30
BLOCKS, BLOCK_TOKENS = 18_000, 16
# Of a dense model, tied embeddings, no head_dim: facebook/opt's and Llama's kind.
DENSE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def needed_bytes(config: dict, layers: int, blocks: int) -> int:
    kv = blocks * BLOCK_TOKENS * kv_bytes_per_token_and_layer(config)
    return layers * (layer_bytes(config) + kv) + embedding_bytes(config)


# What nvidia-smi says of an RTX 4090, an A6000, an H100 and an H200, in MiB.
@pytest.mark.parametrize(
    ("memory_mib", "layers"),
    [(24564, 10), (49140, 24), (81559, 41), (143771, 48)],
    ids=["24 GB", "48 GB", "80 GB", "141 GB"],
)
def test_the_whole_cache_fits_each_usual_card(memory_mib, layers):
    memory_bytes = memory_mib * 2**20
    fit = fit_shape(memory_bytes, QWEN, BLOCKS, BLOCK_TOKENS)
    assert (fit.layers, fit.num_blocks) == (layers, BLOCKS)
    used = needed_bytes(QWEN, layers, BLOCKS)
    assert used <= usable_bytes(memory_bytes) < memory_bytes
    if layers < QWEN["num_hidden_layers"]:
        assert needed_bytes(QWEN, layers + 1, BLOCKS) > usable_bytes(memory_bytes)


def test_the_weights_are_those_of_the_models_own_card():
    weights = 48 * layer_bytes(QWEN) + embedding_bytes(QWEN)
    assert weights / 2 == pytest.approx(30.5e9, rel=0.002)  # Parameters.
    dense = 16 * layer_bytes(DENSE) + embedding_bytes(DENSE)
    assert dense / 2 == pytest.approx(1.236e9, rel=0.002)  # Llama 3.2 1B.


def test_real_weights_are_served_whole_with_the_blocks_that_are_left():
    weights = 61 * 10**9
    whole = fit_weights(141 * 10**9, weights, QWEN, BLOCKS, BLOCK_TOKENS)
    assert (whole.layers, whole.num_blocks) == (48, BLOCKS)
    less = fit_weights(81559 * 2**20, weights, QWEN, BLOCKS, BLOCK_TOKENS)
    assert less.layers == 48
    assert LEAST_BLOCKS <= less.num_blocks < BLOCKS


def test_real_weights_that_leave_no_room_for_a_cache_are_refused():
    with pytest.raises(DoesNotFit, match="serve a smaller model"):
        fit_weights(48 * 10**9, 61 * 10**9, QWEN, BLOCKS, BLOCK_TOKENS)


@given(st.integers(4 * GIB, 300 * GIB), st.sampled_from([QWEN, DENSE]))
def test_more_memory_never_holds_less_and_nothing_is_served_that_does_not_fit(
    memory_bytes, config
):
    try:
        fit = fit_shape(memory_bytes, config, BLOCKS, BLOCK_TOKENS)
    except DoesNotFit:
        return
    assert needed_bytes(config, fit.layers, fit.num_blocks) <= usable_bytes(
        memory_bytes
    )
    more = fit_shape(memory_bytes + GIB, config, BLOCKS, BLOCK_TOKENS)
    assert more.layers >= fit.layers
