# SPDX-License-Identifier: Apache-2.0
"""What each instance of a fleet is told, and the time its null model takes."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.instances import (
    Instance,
    InstancesError,
    read_instances,
    write_instances,
)
from fleet.launch import __main__ as launch
from fleet.launch import settings
from fleet.launch.ports import PortsError, reserve
from fleet.launch.profile import FleetProfile, Forward, read_profile, slowed
from fleet.launch.settings import SettingsError, Spec
from lab.config import ConfigError
from lab.paths import CONFIGS, REPOSITORY
from lab.serving import preflight
from lab.serving.connector import load_connector
from lab.serving.preflight import PreflightError
from lab.serving.server import command

PROFILES = sorted((CONFIGS / "fleet").glob("*.toml"))
CONNECTORS = [
    "plain",
    "noop",
    "nixl_both",
    "mooncake_both",
    "mooncake_both_fixed",
    "direct_read_idle",
]


def profile() -> FleetProfile:
    return read_profile(CONFIGS / "fleet" / "h20-30b-a3b.toml")


def spec(connector: str, roles: list[str], kv_events: bool = False) -> Spec:
    return Spec(profile(), connector, load_connector(connector), roles, kv_events)


def told(spec: Spec, folder: Path) -> list[list[str]]:
    """The command line of each instance."""
    lines = []
    for index, ports in enumerate(reserve(len(spec.roles))):
        made = settings.instance(spec, index, ports, folder)
        own = settings.own_profile(spec, index, made, ports, {})
        connector = settings.own_connector(spec, made)
        lines.append(command(own, connector, folder, ports.http))
    return lines


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_committed_profile_is_read(path):
    assert read_profile(path).name == path.stem


@given(st.integers(1, 8))
def test_no_two_instances_share_a_port(instances):
    ports = [dataclasses.astuple(own) for own in reserve(instances)]
    everyone = [port for own in ports for port in own]
    assert len(set(everyone)) == len(everyone)


def test_a_taken_port_is_named():
    first, second = (own.http for own in reserve(2))
    with (
        socket.create_server(("127.0.0.1", second)),
        pytest.raises(PortsError, match=f"port {second} is taken"),
    ):
        reserve(2, first)


def test_a_fleet_needs_the_memory_of_all_its_servers(monkeypatch):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 20.0)
    preflight.check_resources(profile(), 4)
    monkeypatch.setattr(preflight, "_available_gib", lambda: 6.0)
    preflight.check_resources(profile(), 1)
    with pytest.raises(PreflightError, match=r"6\.0 GiB .* 4 server\(s\) .* 12\.5"):
        preflight.check_resources(profile(), 4)


def test_a_fleet_without_memory_for_it_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 6.0)
    folder = tmp_path / "fleet"
    monkeypatch.setattr(sys, "argv", ["fleet.launch", "--folder", str(folder)])
    monkeypatch.setattr(launch, "exit_on_signals", lambda: None)
    assert launch.main() == 1
    assert "4 server(s) at once need 12.5" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_instances_of_one_connector_differ_where_they_must(connector, tmp_path):
    spec_of_two = spec(connector, ["both", "both"], kv_events=True)
    ports = reserve(2)
    made = [settings.instance(spec_of_two, i, ports[i], tmp_path) for i in (0, 1)]
    for field in ("name", "url", "bootstrap_url", "direct_read", "kv_events"):
        first, second = (getattr(one, field) for one in made)
        assert first != second or first is None, field
    assert {one.connector for one in made} == {spec_of_two.kind}
    assert made[0].block_tokens == spec_of_two.profile.block_size


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [("both", "kv_both"), ("prefill", "kv_producer"), ("decode", "kv_consumer")],
)
def test_the_role_is_what_the_connector_is_told(role, kv_role, tmp_path):
    (line,) = told(spec("mooncake_both", [role]), tmp_path)
    transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert transfer["kv_role"] == kv_role
    assert transfer["kv_buffer_device"] == "cpu"


def test_direct_read_keeps_what_its_config_says_beside_its_address(tmp_path):
    (line,) = told(spec("direct_read_idle", ["both"]), tmp_path)
    transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    assert extra["mooncake_protocol"] == "tcp"
    assert {"host", "port"} <= set(extra)


def test_a_decode_instance_has_no_bootstrap_server(tmp_path):
    of_three = spec("mooncake_both", ["both", "prefill", "decode"])
    ports = reserve(3)
    made = [settings.instance(of_three, i, ports[i], tmp_path) for i in range(3)]
    assert [one.bootstrap_url is None for one in made] == [False, False, True]


@pytest.mark.parametrize("connector", ["plain", "noop", "direct_read_idle"])
def test_roles_need_a_connector_that_moves_kv(connector, tmp_path):
    with pytest.raises(SettingsError, match="moves KV"):
        told(spec(connector, ["prefill"]), tmp_path)


def test_events_are_published_only_where_asked_for(tmp_path):
    (quiet,) = told(spec("plain", ["both"]), tmp_path)
    (loud,) = told(spec("plain", ["both"], kv_events=True), tmp_path)
    assert "--kv-events-config" not in quiet
    events = json.loads(loud[loud.index("--kv-events-config") + 1])
    assert events["enable_kv_cache_events"] is True


def test_cached_tokens_are_always_asked_of_vllm(tmp_path):
    for line in told(spec("plain", ["both", "both"]), tmp_path):
        assert "--enable-prompt-tokens-details" in line


def test_each_instance_has_a_gpu_of_its_own_where_there_are_gpus(tmp_path):
    on_gpus = dataclasses.replace(
        spec("plain", ["both", "both"]),
        profile=msgspec.structs.replace(profile(), flavour="gpu"),
    )
    ports = reserve(2)
    made = [settings.instance(on_gpus, i, ports[i], tmp_path) for i in (0, 1)]
    devices = [
        settings.own_profile(on_gpus, i, made[i], ports[i], {}).server_env[
            "CUDA_VISIBLE_DEVICES"
        ]
        for i in (0, 1)
    ]
    assert devices == ["0", "1"]


@given(st.floats(0.1, 10))
def test_a_slower_profile_is_slower_in_every_part(factor):
    before, after = profile().forward, slowed(profile(), factor).forward
    for name, value in msgspec.structs.asdict(before).items():
        assert getattr(after, name) == pytest.approx(value * factor)


def test_only_a_simulated_forward_can_be_slowed():
    real = msgspec.structs.replace(profile(), forward=None, model="some/path")
    with pytest.raises(ConfigError, match="null model"):
        slowed(real, 2)
    with pytest.raises(ConfigError, match="above 0"):
        slowed(profile(), 0)


@pytest.mark.parametrize("extra", ["", 'model = "x"\n[forward]\nforward_us = 1\n'])
def test_a_profile_serves_either_the_null_model_or_a_real_one(extra, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'summary = "x"\nflavour = "cpu"\nnum_blocks = 1\nblock_size = 16\n'
        "max_model_len = 1\nmax_num_batched_tokens = 1\nmax_num_seqs = 1\n" + extra
    )
    with pytest.raises(ConfigError, match=r"p\.toml.*one of"):
        read_profile(path)


def test_an_instances_file_is_read_as_it_was_written(tmp_path):
    spec_of_two = spec("direct_read_idle", ["both", "both"], kv_events=True)
    ports = reserve(2)
    made = [settings.instance(spec_of_two, i, ports[i], tmp_path) for i in (0, 1)]
    write_instances(tmp_path / "instances.json", made)
    assert read_instances(tmp_path / "instances.json") == made


@pytest.mark.parametrize(
    ("instances", "what"),
    [
        ([], "empty"),
        ([Instance("a", "http://x"), Instance("a", "http://y")], "name 'a'"),
        ([Instance("a", "http://x"), Instance("b", "http://x")], "url 'http://x'"),
        ([Instance("a", "x:80")], "no http URL"),
        ([Instance("a", "http://x", block_tokens=0)], "block_tokens"),
    ],
)
def test_a_wrong_instances_file_is_refused_by_name_and_reason(
    instances, what, tmp_path
):
    path = tmp_path / "instances.json"
    document = {"schema": "kvtax.instances/1", "instances": instances}
    path.write_bytes(msgspec.json.encode(document))
    with pytest.raises(InstancesError, match=rf"instances\.json.*{what}"):
        read_instances(path)


@pytest.fixture
def simulated_forward(monkeypatch):
    plugin = REPOSITORY / "lab" / "serving" / "vllm_plugin" / "kvtax_null_model"
    # The file alone: the package beside it imports vLLM when it is registered.
    monkeypatch.syspath_prepend(str(plugin))
    import forward

    yield forward
    del sys.modules["forward"]


COSTS = [
    Forward(1000),
    Forward(500, 10),
    Forward(500, 10, 0.5),
]


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_a_forward_takes_what_its_tokens_and_their_context_cost(
    cost, simulated_forward, monkeypatch, tmp_path
):
    totals = tmp_path / "totals"
    monkeypatch.setenv("KVTAX_FORWARD_TOTALS", str(totals))
    forward = simulated_forward.SimulatedForward(**msgspec.structs.asdict(cost))
    # A prefill of 20 tokens from position 100 on, and a decode at 7.
    positions = torch.tensor([*range(100, 120), 7])
    for _ in range(3):
        forward.wait(positions)
    context = sum(range(100, 120)) + 7
    expected_us = (
        cost.forward_us + cost.us_per_token * 21 + cost.us_per_context_token * context
    )
    forwards, simulated_ns, slept_ns = np.fromfile(totals, np.int64)
    assert forwards == 3
    assert simulated_ns == pytest.approx(3000 * expected_us, rel=1e-6)
    assert slept_ns >= simulated_ns
