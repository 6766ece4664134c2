# SPDX-License-Identifier: Apache-2.0
"""A server's spec says all of what it is told, and nothing that it must not inherit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtax import patcher
from kvtax.engine import ServerError, preflight
from kvtax.engine.connector import Connector, connector_names, load_connector
from kvtax.engine.environment import (
    HASH_SEED,
    NULL_MODEL_NAME,
    NULL_MODEL_PLUGIN,
    engine_environment,
)
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE, Forward, write_null_model
from kvtax.engine.overlay import build_overlay
from kvtax.engine.server import ServerSpec, resolve
from kvtax.patcher.at_import import SOURCES
from kvtax.patcher.import_finder import MODULES
from kvtax.paths import PATCHES, REPOSITORY
from kvtax.proc.ports import reserve
from tests.releases import bare_environment, package_of

READ = "direct_read_serving"
# What `ray start` has for --min-worker-port and --max-worker-port.
# MC_MIN_RPC_PORT to MC_MAX_RPC_PORT, as Mooncake has them by default.
MOONCAKES = range(15_000, 17_001)
RAYS_WORKERS = range(10_002, 20_000)


def spec(folder: Path, connector: Connector | None = None) -> ServerSpec:
    connector = connector or Connector("", [])
    overlay = folder / "overlay"
    return resolve(connector, CPU_ENGINE, folder, folder, {}, overlay=overlay)


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


def test_all_keys_of_an_option_are_private(tmp_path):
    made = spec(tmp_path).with_options("--api-key", "sesame", "agape", "--port", "1")
    file = tmp_path / "server.yaml"
    shown = made.private_argv(file)
    assert yaml.safe_load(file.read_text()) == {"api-key": ["sesame", "agape"]}
    assert shown[-4:] == ["--port", "1", "--config", str(file)]


@pytest.mark.parametrize("more", [["--config", "x.yaml"], []])
def test_a_command_line_stays_as_it_is_without_secrets_or_with_a_file(more, tmp_path):
    secret = ["--api-key", "sesame"] if more else []
    made = spec(tmp_path).with_options(*secret, *more)
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


@pytest.mark.slow
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
    connector = Connector(
        "", [], engine_args={"kv_events_config": events, "dtype": "half"}
    )
    argv = spec(tmp_path, connector).argv
    assert json.loads(argv[argv.index("--kv-events-config") + 1]) == events
    assert argv[argv.index("--dtype") + 1] == "half"


def test_a_connector_whose_companion_nobody_started_is_refused(tmp_path):
    with pytest.raises(ServerError, match="needs a companion, or a folder of its own"):
        spec(tmp_path, load_connector("observatory/mooncake_store"))
    with pytest.raises(ServerError, match="needs a companion, or a folder of its own"):
        spec(tmp_path, load_connector("observatory/offloading_fs"))


def test_each_side_channel_is_told_the_port_that_the_spec_names(tmp_path):
    made = spec(tmp_path)
    ports = {name: made.env[name] for name in made.env if name.endswith("_PORT")}
    assert ports["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(made.ports.nixl)
    assert ports["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == str(made.ports.bootstrap)
    assert ports["DIRECT_READ_PORT"] == str(made.ports.direct_read)


def test_what_one_server_is_told_besides_changes_no_other(tmp_path):
    made = spec(tmp_path)
    before = dataclasses.replace(made, argv=[*made.argv], env=dict(made.env))
    more = made.with_options("--more", MORE="1")
    assert made == before
    assert more.argv == [*made.argv, "--more"]
    assert more.env == made.env | {"MORE": "1"}


@given(st.integers(1, 8))
def test_no_two_servers_share_a_port(servers):
    ports = [dataclasses.asdict(own) for own in reserve(servers)]
    everyone = [port for own in ports for port in own.values()]
    assert len(everyone) == 5 * servers
    assert len(set(everyone)) == len(everyone)


@pytest.mark.slow
def test_no_port_is_one_that_mooncake_or_ray_may_choose_meanwhile():
    for _ in range(200):
        assert reserve(8)[0].http >= max(MOONCAKES.stop, RAYS_WORKERS.stop)


def test_an_overlay_whose_path_would_be_split_is_refused(tmp_path):
    with pytest.raises(ServerError, match=r"a:b: a colon ends a path in PYTHONPATH"):
        engine_environment(tmp_path / "a:b", CPU_ENGINE, reserve(1)[0])


SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"


@pytest.mark.slow
def test_hashes_are_those_of_the_patches_that_the_release_needs(tmp_path):
    release = package_of("0.18.1")
    names = [SHORT_CIRCUIT, "nixl_cpu_layout"]
    hashes = build_overlay(tmp_path / "o", names, {"DELAY_US": 1}, vllm=release)
    assert hashes == {
        SHORT_CIRCUIT: patcher.load_patches(PATCHES)[SHORT_CIRCUIT].sha256
    }
    (line,) = (tmp_path / "o" / MODULES).read_text().splitlines()
    assert line.split()[0].endswith("v1.mooncake.mooncake_connector")


def test_an_unknown_patch_is_refused_and_no_folder_is_made(tmp_path):
    with pytest.raises(patcher.BlockPatchError, match=SHORT_CIRCUIT):
        build_overlay(tmp_path / "o", ["no_such_patch"], {})
    assert not (tmp_path / "o").exists()


PAUSES = ["nixl_progress_delay", "nixl_cu13_progress_delay"]


@pytest.mark.slow
def test_the_package_that_nixl_loads_is_patched_too(tmp_path):
    overlay = tmp_path / "o"
    if not build_overlay(overlay, PAUSES, {"DELAY_US": 7}):
        pytest.skip("nixl is not installed")
    env = engine_environment(overlay, CPU_ENGINE, reserve(1)[0])
    script = "import sys, nixl._api as api; print(api.__loader__.patched)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )
    patched = Path(done.stdout.strip())
    assert patched.parent.parent == overlay / SOURCES
    assert "agent_config.pthrDelay = 7" in patched.read_text()


def test_a_patch_of_a_package_that_is_not_installed_is_left_out(tmp_path, monkeypatch):
    def no_package(self: Installation, name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(Installation, "package", no_package)
    assert build_overlay(tmp_path / "o", PAUSES, {}) == {}
    with pytest.raises(ModuleNotFoundError):
        build_overlay(tmp_path / "v", ["step_timing_v2"], {})


@pytest.mark.parametrize(
    ("inherited", "given"),
    [
        (None, None),
        ("", "kvtax_null_model"),
        ("theirs,another", "theirs,another,kvtax_null_model"),
    ],
)
def test_a_list_of_plugins_that_is_inherited_gets_the_null_model(
    inherited, given, monkeypatch
):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if inherited is not None:
        monkeypatch.setenv("VLLM_PLUGINS", inherited)
    env = engine_environment(None, CPU_ENGINE, reserve(1)[0])
    assert env.get("VLLM_PLUGINS") == given
    (declared,) = NULL_MODEL_PLUGIN.glob("*/entry_points.txt")
    assert f"\n{NULL_MODEL_NAME} = " in declared.read_text()


@pytest.fixture
def theirs(tmp_path) -> Installation:
    """A Python of a user whose vLLM has no bytecode, as uv installs it."""
    server = bare_environment(tmp_path / "venv") / "vllm/entrypoints/openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text("")
    for folder in (server, *list(server.parents)[:2]):
        (folder / "__init__.py").write_text("")
    return installation(str(tmp_path / "venv" / "bin" / "python"))


@pytest.mark.slow
def test_bytecode_that_a_users_packages_lack_is_made_once_and_elsewhere(
    theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "cpu_preload", lambda _: [])
    before = sorted(Path(theirs.prefix).rglob("*"))
    checked = preflight.check_import(tmp_path, CPU_ENGINE, theirs)
    assert sorted(Path(theirs.prefix).rglob("*")) == before
    assert checked.bytecode == str(tmp_path / "bytecode")
    assert [*(tmp_path / "bytecode").rglob("api_server.*.pyc")]
    monkeypatch.setattr("kvtax.engine.environment.cpu_preload", lambda _: [])
    env = engine_environment(None, CPU_ENGINE, reserve(1)[0], checked)
    script = "import vllm; print(vllm.__spec__.cached)"
    command = checked.command("-c", script)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(checked.bytecode)


@pytest.mark.slow
def test_a_vllm_that_cannot_be_imported_is_refused_with_its_own_words(
    theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "cpu_preload", lambda _: [])
    (theirs.package("vllm") / "__init__.py").write_text("import no_such_library")
    with pytest.raises(preflight.PreflightError, match="no_such_library"):
        preflight.check_import(tmp_path, CPU_ENGINE, theirs)


def test_who_reads_while_it_is_made_again_reads_it_whole(tmp_path: Path) -> None:
    """Each run of an experiment makes it, and servers of others are starting then."""
    folder = tmp_path / "model"
    write_null_model(folder, 4096, Forward(0))
    enough = threading.Event()

    def make_again() -> None:
        while not enough.is_set():
            write_null_model(folder, 4096, Forward(0))

    writer = threading.Thread(target=make_again)
    writer.start()
    try:
        for _ in range(200):
            read = json.loads((folder / "config.json").read_text())
            assert read["max_position_embeddings"] == 4096
    finally:
        enough.set()
        writer.join()
