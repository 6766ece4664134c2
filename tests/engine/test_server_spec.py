# SPDX-License-Identifier: Apache-2.0
"""A server's spec says all of what it is told, and nothing that it must not inherit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtax.engine import ServerError
from kvtax.engine.connector import Connector, connector_names, load_connector
from kvtax.engine.environment import HASH_SEED
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.server import Engine, ServerSpec, resolve
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import MOONCAKE, PortsError, reserve

READ = "direct_read_serving"
# What `ray start` has for --min-worker-port and --max-worker-port.
RAYS_WORKERS = range(10_002, 20_000)


def spec(folder: Path, connector: Connector | None = None) -> ServerSpec:
    connector = connector or Connector("", [])
    return resolve(
        Engine(folder / "overlay", CPU_ENGINE, connector, folder), folder, {}
    )


def test_a_connectors_environment_reaches_its_server(tmp_path):
    made = spec(tmp_path, Connector("", [], env={"ITS_OWN": "1"}))
    assert made.env["ITS_OWN"] == "1"
    assert "ITS_OWN" not in spec(tmp_path).env


def test_a_command_line_and_a_log_have_no_secrets_of_the_connector(tmp_path):
    config = {"kv_connector": "Mine", "password": "sesame", "url": "x://u:agape@y"}
    connector = Connector("", [], {}, config, env={"ITS_TOKEN": "12345"})
    connector = msgspec.structs.replace(connector, engine_args={"api_key": "let me"})
    made = spec(tmp_path, connector)
    assert set(made.secrets) == {"sesame", "agape", "12345", "let me"}
    file = tmp_path / "server.yaml"
    shown = made.private_argv(file)
    assert not [text for text in made.secrets if text in " ".join(shown)]
    assert shown[-2:] == ["--config", str(file)]
    hidden = yaml.safe_load(file.read_text())
    given = hidden.pop("kv-transfer-config")
    assert json.loads(given) == CPU_ENGINE.kv_transfer_config | config
    assert hidden == {"api-key": "let me"}
    options = ["--kv-transfer-config", given, "--api-key", "let me"]
    assert sorted([*shown[:-2], *options]) == sorted(made.argv)


@pytest.mark.parametrize("more", [["--config", "x.yaml"], []])
def test_a_command_line_stays_as_it_is_without_secrets_or_with_a_file(more, tmp_path):
    secret = ["--api-key", "sesame"] if more else []
    made = spec(tmp_path).told(*secret, *more)
    assert made.private_argv(tmp_path / "server.yaml") == made.argv
    assert not (tmp_path / "server.yaml").exists()


def test_servers_of_a_run_make_the_same_hashes_and_share_a_secret(tmp_path):
    first, second = (spec(tmp_path, load_connector(name)) for name in ("noop", READ))
    assert first.env["PYTHONHASHSEED"] == second.env["PYTHONHASHSEED"] == HASH_SEED
    assert first.env["DIRECT_READ_SECRET"] == second.env["DIRECT_READ_SECRET"]


@pytest.mark.slow
def test_each_run_has_a_secret_of_its_own_unless_it_is_given_one():
    script = "from kvtax.engine.environment import DIRECT_READ_SECRET as s; print(s)"

    def secret(**given: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "DIRECT_READ_SECRET"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, env=env | given, cwd=REPOSITORY, capture_output=True, check=True
        )
        return done.stdout.decode().strip()

    first, second = secret(), secret()
    assert first != second and len(first) == len(second) == 64
    assert secret(DIRECT_READ_SECRET="sixteen bytes or more") == "sixteen bytes or more"


def test_no_config_holds_a_secret():
    for name in connector_names():
        assert not [key for key in load_connector(name).env if "SECRET" in key], name


def test_the_recording_of_an_outer_process_is_not_inherited(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_DIR", "/elsewhere")
    monkeypatch.setenv("KVTAX_FORWARD_TOTALS", "/elsewhere/totals")
    env = spec(tmp_path).env
    assert env["KVTAX_STEP_RECORDS_DIR"] == str(tmp_path)
    assert "KVTAX_FORWARD_TOTALS" not in env


def test_a_connectors_engine_arguments_reach_its_server_as_json(tmp_path):
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    told = Connector("", [], engine_args={"kv_events_config": events, "dtype": "half"})
    argv = spec(tmp_path, told).argv
    assert json.loads(argv[argv.index("--kv-events-config") + 1]) == events
    assert argv[argv.index("--dtype") + 1] == "half"


def test_a_connector_whose_companion_nobody_started_is_refused(tmp_path):
    with pytest.raises(ServerError, match="needs a companion, or a folder of its own"):
        spec(tmp_path, load_connector("observatory/mooncake_store"))
    with pytest.raises(ServerError, match="needs a companion, or a folder of its own"):
        spec(tmp_path, load_connector("observatory/example"))


def test_each_side_channel_is_told_the_port_that_the_spec_names(tmp_path):
    made = spec(tmp_path)
    told = {name: made.env[name] for name in made.env if name.endswith("_PORT")}
    assert told["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(made.ports.nixl)
    assert told["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == str(made.ports.bootstrap)
    assert told["DIRECT_READ_PORT"] == str(made.ports.direct_read)


def test_what_one_server_is_told_besides_changes_no_other(tmp_path):
    made = spec(tmp_path)
    before = dataclasses.replace(made, argv=[*made.argv], env=dict(made.env))
    more = made.told("--more", MORE="1")
    assert made == before
    assert more.argv == [*made.argv, "--more"]
    assert more.env == made.env | {"MORE": "1"}


@given(st.integers(1, 8))
def test_no_two_servers_share_a_port(servers):
    ports = [dataclasses.asdict(own) for own in reserve(servers)]
    everyone = [port for own in ports for port in own.values()]
    assert len(everyone) == 5 * servers
    assert len(set(everyone)) == len(everyone)


def test_no_port_is_one_that_mooncake_or_ray_may_choose_meanwhile():
    for _ in range(200):
        assert reserve(8)[0].http >= max(MOONCAKE.stop, RAYS_WORKERS.stop)
    with pytest.raises(PortsError, match="port 15000 is Mooncake's to choose"):
        reserve(1, MOONCAKE.start - 3)


def test_ports_that_are_not_there_are_refused():
    with pytest.raises(PortsError, match="port 65536 is taken"):
        reserve(1, 65_530)
