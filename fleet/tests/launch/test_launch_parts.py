# SPDX-License-Identifier: Apache-2.0
"""The command line of each instance of a fleet, and the time its null model takes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtax.cli import Exit, main
from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.engine.connector import load_connector
from kvtax.engine.null_model import Forward
from kvtax.engine.preflight import PreflightError
from kvtax.engine.server import ServerSpec
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from tests.fake_gpu import H100, path_with_gpus

from kvtax_fleet.launch.instance_settings import (
    InstanceSettings,
    read_instance_settings,
    slowed,
)
from kvtax_fleet.launch.spec import (
    FleetSpec,
    Member,
    SpecError,
    assign_gpus,
    members,
    server_of,
)
from kvtax_fleet.paths import CONFIGS

PROFILES = sorted((CONFIGS / "profiles").glob("*.toml"))
CONNECTORS = [
    "plain",
    "noop",
    "nixl_both",
    "mooncake_both",
    "mooncake_both_fixed",
    "direct_read_idle",
]


def settings() -> InstanceSettings:
    return read_instance_settings(CONFIGS / "profiles" / "h20-30b-a3b.toml")


def spec(connector: str, roles: list[str]) -> FleetSpec:
    return FleetSpec(settings(), connector, load_connector(connector), roles)


def launched_as(spec: FleetSpec) -> list[Member]:
    return members(spec, reserve(len(spec.roles)), assign_gpus(spec))


def servers_of(spec: FleetSpec, folder: Path) -> list[ServerSpec]:
    """What each instance is told."""
    made = launched_as(spec)
    return [server_of(spec, member, folder, folder, folder) for member in made]


def transfer_config(server: ServerSpec) -> dict:
    return json.loads(server.argv[server.argv.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_committed_profile_is_read(path):
    assert read_instance_settings(path).name == path.stem


def test_a_fleet_needs_the_memory_of_all_its_servers(monkeypatch):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 20.0)
    preflight.check_resources(settings(), 4)
    monkeypatch.setattr(preflight, "_available_gib", lambda: 6.0)
    preflight.check_resources(settings(), 1)
    with pytest.raises(PreflightError, match=r"6\.0 GiB .* 4 server\(s\) .* 12\.5"):
        preflight.check_resources(settings(), 4)


def test_a_fleet_without_memory_for_it_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 6.0)
    folder = tmp_path / "fleet"
    assert main(["fleet", "launch", "--folder", str(folder)]) == Exit.NOT_MEASURED
    assert "4 server(s) at once need 12.5" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_instances_of_one_connector_differ_where_they_must(connector, tmp_path):
    spec_of_two = spec(connector, ["both", "both"])
    made = [member.instance for member in launched_as(spec_of_two)]
    for field in ("name", "url", "bootstrap_url"):
        first, second = (getattr(each, field) for each in made)
        assert first != second or first is None, field
    assert {each.connector for each in made} == {spec_of_two.connector.transfer}
    assert made[0].block_tokens == spec_of_two.settings.block_size


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [("both", "kv_both"), ("prefill", "kv_producer"), ("decode", "kv_consumer")],
)
def test_the_role_is_what_the_connector_is_told(role, kv_role, tmp_path):
    (server,) = servers_of(spec("mooncake_both", [role]), tmp_path)
    transfer = transfer_config(server)
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_buffer_device"] == "cpu"


def test_direct_read_keeps_what_its_config_says_and_listens_where_it_is_named(tmp_path):
    of_one = spec("direct_read_idle", ["both"])
    (server,) = servers_of(of_one, tmp_path)
    extra = transfer_config(server)["kv_connector_extra_config"]
    assert extra["mooncake_protocol"] == "tcp"
    assert server.env["DIRECT_READ_PORT"] == str(server.ports.direct_read)


def test_a_decode_instance_has_no_bootstrap_server(tmp_path):
    of_three = spec("mooncake_both", ["both", "prefill", "decode"])
    made = [member.instance for member in launched_as(of_three)]
    assert [each.bootstrap_url is None for each in made] == [False, False, True]


@pytest.mark.parametrize("connector", ["plain", "noop", "direct_read_idle"])
def test_roles_need_a_connector_that_moves_kv(connector, tmp_path):
    with pytest.raises(SpecError, match="moves KV"):
        servers_of(spec(connector, ["prefill"]), tmp_path)


def test_an_instance_listens_on_loopback_unless_told_otherwise(tmp_path):
    (server,) = servers_of(spec("nixl_both", ["both"]), tmp_path)
    assert server.argv[server.argv.index("--host") + 1] == "127.0.0.1"
    assert server.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert "tcp://" not in str(server.argv)


def test_cached_tokens_are_always_asked_of_vllm(tmp_path):
    for server in servers_of(spec("plain", ["both", "both"]), tmp_path):
        assert "--enable-prompt-tokens-details" in server.argv


def on_gpus(instances: int, **changes) -> FleetSpec:
    changed = msgspec.structs.replace(settings(), flavour="gpu", **changes)
    return dataclasses.replace(spec("plain", ["both"] * instances), settings=changed)


@pytest.fixture
def six_gpus(tmp_path, monkeypatch):
    """Of which nvidia-smi shows those that CUDA_VISIBLE_DEVICES names, in its order."""
    lines = "\n".join(H100.replace("0, ", f"{index}, ", 1) for index in range(6))
    wanted = "${3#--id=}"
    script = (
        f'all="{lines}"\n[ -z "$3" ] && echo "$all" && exit\n'
        f'for id in $(echo {wanted} | tr , " "); do echo "$all" | grep "^$id,"; done'
    )
    monkeypatch.setenv("PATH", path_with_gpus(tmp_path, script=script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def devices(spec: FleetSpec, folder: Path) -> list[str]:
    servers = servers_of(spec, folder)
    assert {each.env["CUDA_DEVICE_ORDER"] for each in servers} == {"PCI_BUS_ID"}
    return [server.env["CUDA_VISIBLE_DEVICES"] for server in servers]


def test_no_gpu_is_given_to_two_instances(six_gpus, tmp_path):
    assert devices(on_gpus(2), tmp_path) == ["0", "1"]
    assert devices(on_gpus(3, tensor_parallel=2), tmp_path) == ["0,1", "2,3", "4,5"]
    both = on_gpus(1, tensor_parallel=2, data_parallel=3)
    assert devices(both, tmp_path) == ["0,1,2,3,4,5"]


def test_the_gpus_that_the_user_left_visible_are_the_only_ones(
    six_gpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,3")
    assert devices(on_gpus(3), tmp_path) == ["5", "2", "3"]
    with pytest.raises(SpecError, match=r"2 instances of 2 workers .* 3 can be seen"):
        servers_of(on_gpus(2, tensor_parallel=2), tmp_path)


def test_workers_and_engines_are_told_to_vllm_and_one_of_each_is_not(tmp_path):
    (alone,) = servers_of(spec("plain", ["both"]), tmp_path)
    assert not [word for word in alone.argv if "parallel" in word]
    changed = msgspec.structs.replace(settings(), tensor_parallel=2, data_parallel=3)
    many = dataclasses.replace(spec("plain", ["both"]), settings=changed)
    (server,) = servers_of(many, tmp_path)
    words = " ".join(server.argv)
    assert "--tensor-parallel-size 2" in words
    assert "--data-parallel-size 3" in words
    # Engines that look for a port from the same one on at the same time find the same.
    assert "VLLM_PORT" in alone.env
    assert "VLLM_PORT" not in server.env


def test_the_number_of_blocks_is_left_to_vllm_where_none_is_given(tmp_path):
    changed = msgspec.structs.replace(settings(), num_blocks=None)
    free = dataclasses.replace(spec("plain", ["both"]), settings=changed)
    (server,) = servers_of(free, tmp_path)
    assert "--num-gpu-blocks-override" not in server.argv


@given(st.floats(0.1, 10))
def test_a_slower_profile_is_slower_in_every_part(factor):
    before, after = settings().forward, slowed(settings(), factor).forward
    for name, value in msgspec.structs.asdict(before).items():
        assert getattr(after, name) == pytest.approx(value * factor)


def test_only_a_simulated_forward_can_be_slowed():
    real = msgspec.structs.replace(settings(), forward=None, model="some/path")
    with pytest.raises(ConfigError, match="null model"):
        slowed(real, 2)
    with pytest.raises(ConfigError, match="above 0"):
        slowed(settings(), 0)


@pytest.mark.parametrize("extra", ["", 'model = "x"\n[forward]\nforward_us = 1\n'])
def test_a_profile_serves_either_the_null_model_or_a_real_one(extra, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'summary = "x"\nflavour = "cpu"\nnum_blocks = 1\nblock_size = 16\n'
        "max_model_len = 1\nmax_num_batched_tokens = 1\nmax_num_seqs = 1\n" + extra
    )
    with pytest.raises(ConfigError, match=r"p\.toml.*one of"):
        read_instance_settings(path)


@pytest.fixture
def simulated_forward(monkeypatch):
    plugin = REPOSITORY / "kvtax" / "engine" / "vllm_plugin" / "kvtax_null_model"
    # The file alone: the package beside it imports vLLM when it is registered.
    monkeypatch.syspath_prepend(str(plugin))
    import forward

    yield forward
    del sys.modules["forward"]


COSTS = [
    Forward(1000),
    Forward(500, 10),
    Forward(500, 10, 0.5),
    Forward(500, 10, 0.5, 2),
    Forward(500, 10, launch_us=900),
]


@pytest.mark.slow
@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_a_forward_takes_what_its_tokens_and_their_context_cost(
    cost, simulated_forward, monkeypatch, tmp_path
):
    import torch

    totals = tmp_path / "totals"
    monkeypatch.setenv("KVTAX_FORWARD_TOTALS", str(totals))
    forward = simulated_forward.SimulatedForward(**msgspec.structs.asdict(cost))
    # A prefill of 20 tokens from position 100 on, and a decode at 7.
    positions = torch.tensor([*range(100, 120), 7])
    for _ in range(3):
        forward.wait(positions)
    context = sum(range(100, 120)) + 7
    expected_us = max(
        cost.launch_us,
        cost.forward_us
        + cost.us_per_token * 21
        + cost.us_per_context_token * context
        + cost.us_per_kv_token * (100 + 7),
    )
    forwards, simulated_ns, slept_ns = np.fromfile(totals, np.int64)
    assert forwards == 3
    assert simulated_ns == pytest.approx(3000 * expected_us, rel=1e-6)
    assert slept_ns >= simulated_ns
