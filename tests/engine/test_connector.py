# SPDX-License-Identifier: Apache-2.0
"""A new connector takes one TOML, or its name on the command line, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec
import psutil
import pytest
from kvtax_fleet.launch import spec as launch_spec
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.launch.spec import FleetSpec, SpecError, members
from kvtax_fleet.paths import CONFIGS

from kvtax.cli import Exit, main
from kvtax.config import ConfigError
from kvtax.engine import ServerError, preflight, provenance
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import (
    Companion,
    Connector,
    load_connector,
    needs_company,
    own_connector,
    stand_ins,
)
from kvtax.engine.installation import installation
from kvtax.engine.published import published
from kvtax.engine.server import resolve
from kvtax.proc.ports import reserve
from kvtax.proc.supervise import supervisors
from kvtax.records.run import PLAN_FILE
from microbench.profile import load_profile, measured_with
from microbench.sweep import _begin_run
from tests.proc.living import content, eventually, gone


@pytest.mark.slow
def test_it_is_a_config_of_its_class_s_name_that_records_steps():
    name, connector = own_connector(
        "mypkg.kv:MyConnector", '{"kv_role": "kv_producer"}'
    )
    assert name == "MyConnector"
    assert connector.kv_transfer_config == {
        "kv_connector": "MyConnector",
        "kv_connector_module_path": "mypkg.kv",
        "kv_role": "kv_producer",
    }
    assert connector.patches == ["step_timing_v2"]


@pytest.mark.slow
def test_one_of_vllms_own_is_told_by_its_name_alone():
    _, connector = own_connector("NixlConnector", None)
    assert connector.kv_transfer_config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
    }


def test_the_example_writes_into_the_runs_folder_unless_it_is_given_another():
    _, connector = own_connector("ExampleConnector", None)
    extra = (connector.kv_transfer_config or {})["kv_connector_extra_config"]
    assert extra == {"shared_storage_path": "@FOLDER@/kv"}
    given = {"kv_connector_extra_config": {"shared_storage_path": "/data"}}
    _, connector = own_connector("ExampleConnector", json.dumps(given))
    assert (connector.kv_transfer_config or {}).items() >= given.items()


def children(*connectors: dict) -> str:
    return json.dumps({"kv_connector_extra_config": {"connectors": connectors}})


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
NOBODYS = OFFLOADING | {"kv_connector_module_path": "mypkg.kv"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "config", "patches"),
    [
        ("OffloadingConnector", None, ["cpu_streams"]),
        ("NixlConnector", None, ["nixl_cpu_layout"]),
        ("MultiConnector", None, []),
        ("MultiConnector", children(OFFLOADING), ["cpu_streams"]),
        ("MultiConnector", children(NOBODYS), []),
        ("mypkg.kv:OffloadingConnector", None, []),
    ],
)
def test_one_of_vllms_own_gets_what_stands_in_for_its_gpu(where, config, patches):
    _, connector = own_connector(where, config)
    assert stand_ins(connector) == patches


@pytest.mark.parametrize("where", ["", ":Mine", "mypkg.kv:", "mypkg/kv.py:Mine", "a-b"])
def test_what_names_no_class_is_refused_with_an_example(where):
    with pytest.raises(ConfigError, match=r"want module:Class, such as mypkg\.kv"):
        own_connector(where, None)


@pytest.mark.parametrize("config", ["{", "[]", '{"password": "sesame}'])
def test_a_config_that_is_no_json_object_is_refused_and_not_printed(config):
    with pytest.raises(ConfigError, match="--connector-config is not a") as refused:
        own_connector("mypkg.kv:Mine", config)
    assert "sesame" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        '{"kv_connector": "Theirs"}',
        '{"kv_connector": "Mine", "kv_connector_module_path": "other.kv"}',
    ],
)
def test_a_config_of_another_connector_is_refused(config):
    with pytest.raises(ConfigError, match=r"is not mypkg\.kv:Mine's; name"):
        own_connector("mypkg.kv:Mine", config)
    own_connector("Theirs", '{"kv_connector": "Theirs"}')


@pytest.mark.parametrize("levels", [200, 600, 100_000])
def test_a_config_that_is_nested_too_deeply_is_refused(levels):
    deep = '{"a":' * levels + "1" + "}" * levels
    with pytest.raises(ConfigError, match=r"nested too deeply|is not a JSON object"):
        own_connector("mypkg.kv:Mine", deep)


@pytest.mark.slow
def test_a_config_may_be_in_a_file_that_others_cannot_read(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        own_connector("mypkg.kv:Mine", f"@{file}")
    file.write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        own_connector("mypkg.kv:Mine", f"@{file}")
    file.write_text('{"password": "sesame"}')
    _, connector = own_connector("mypkg.kv:Mine", f"@{file}")
    assert connector.kv_transfer_config["password"] == "sesame"


def test_it_is_measured_between_the_baseline_and_its_twin():
    configs = load_profile("cpu").configs
    assert measured_with("Mine", configs) == ["plain", "noop", "Mine", "plain_aa"]


@pytest.mark.slow
def test_a_profile_that_holds_it_is_recorded_and_served():
    name, connector = own_connector("mypkg.kv:Mine", None)
    profile = msgspec.structs.replace(
        load_profile("cpu"), configs=["plain", name], own={name: connector}
    )
    assert msgspec.to_builtins(profile)["own"][name]["kv_transfer_config"]
    served = profile.connectors()[name]
    assert served.kv_transfer_config == connector.kv_transfer_config
    assert set(served.patches) == {*connector.patches, *profile.patches}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--connector-config", "{}"], "--connector-config needs --connector"),
        (["--vllm", "0.1"], "no lock for vLLM 0.1; there are: 0.22.1"),
        (["--profile", "gpu", "--vllm", "0.32.0"], "for GPUs, use --python"),
        (["--python", "/no/python"], "/no/python cannot be run"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    options, why, capsys, signals, monkeypatch
):
    # Another lock than that of the sweeps that run beside.
    lock = f"kvtax-test-{os.getpid()}.lock"
    monkeypatch.setattr("kvtax.proc.machine_lock.MEASUREMENT", lock)
    assert main(["sweep", *options]) == Exit.BAD_INPUT
    shown = capsys.readouterr()
    assert why in shown.err
    # No trial was planned.
    assert "r0" not in shown.out


SECRETS = [
    ["--api-key", "k1SECRET", "k2SECRET"],
    ["--hf-token", "SECRET"],
    ["--api-key=SECRET"],
    ["--limits=https://u:SECRET@host/x"],
    ["-k", "SECRET"],
    ["-kSECRET"],
    ["HF_TOKEN=SECRET"],
    ["SECRET"],
    ["--header", "Authorization: Bearer SECRET"],
    ["--connector-config", '{"sas":"SECRET"}'],
    ["--connector-config={'password':'SECRET'}"],
    ["--model", "https://x/m?sig=SECRET"],
    ["--only", "plain", "SECRET"],
    ["--vllm", "https://x/?SECRET"],
    ["--limits", "https://hooks.example/services/SECRET"],
    ["--vllm=/home/SECRET/vllm"],
    ["-k", "SECRET".lower()],
    ["--API-KEY", "SECRET".lower()],
    ["HF_TOKEN=SECRET", "SECRET".lower()],
]


@pytest.mark.parametrize("given", SECRETS)
def test_provenance_keeps_no_value_that_is_not_listed(given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_all.sh", *given])
    kept = provenance.collect({}, "kvtax")["command_line"]
    assert "secret" not in kept.lower()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            "sweep --profile cpu-smoke --repeats=3",
            "sweep --profile cpu-smoke --repeats=3",
        ),
        ("fleet run fleet/README.md --jobs 2", "fleet run fleet/README.md --jobs 2"),
        ("axes --ray HOST:1 --again", "axes --ray *** --again"),
        ("fleet run /home/me/mine.toml", "fleet run ***"),
    ],
)
def test_provenance_keeps_the_command_that_was_run(given, kept, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvtax", *given.split()])
    assert provenance.collect({}, "kvtax")["command_line"] == f"kvtax {kept}"


@pytest.mark.parametrize(
    "config",
    [
        {"url": "s3://b?X-Amz-Signature=SECRET"},
        {"bearer": "SECRET"},
        {"tokens": ["SECRET"]},
        {"headers": {"X-Api-Key": "SECRET", "Cookie": "SECRET"}},
        {"env": ["HF_TOKEN=SECRET"]},
        {"dsn": "postgres:SECRET@host"},
        {"key": "SECRET"},
        {"kv_role": "https://u:SECRET@host"},
        {"label": "HF_TOKEN=SECRET"},
        {"summary": "Authorization: Bearer SECRET"},
        {"role": "Bearer SECRET"},
        {"api_keys": {"SECRET": {"quota": 1}}},
        {"Bearer SECRET": 1},
        {"pwd": "SECRET", "otp": ["SECRET"]},
    ],
)
def test_a_result_keeps_no_text_of_a_config_that_is_not_listed(config):
    whole = {"kv_connector": "C", "size": 3, "kv_connector_extra_config": config}
    kept = published({"kv_transfer_config": whole})["kv_transfer_config"]
    assert "SECRET" not in str(kept)
    assert (kept["kv_connector"], kept["size"]) == ("C", 3)
    assert kept.keys() == whole.keys()


def test_the_argument_after_an_option_that_is_named_so_is_a_secret():
    argv = ["--api-key", "sesame", "--served-model-name", "m"]
    assert provenance.masked(argv) == ["--api-key", "***", *argv[2:]]


@pytest.mark.parametrize(
    "given",
    [
        ["--api-key", "first", "SECRET"],
        ["-k", "SECRET"],
        ["HF_TOKEN=SECRET"],
        ["--header", "Authorization: Bearer SECRET"],
        ["--connector-config={'password': 'SECRET'}"],
        ["--connector-config", '{"headers":{"X-Api-Key":"SECRET","Cookie":"SECRET"}}'],
        ["--connector-config", '{"aws_access_key_id":"SECRET","tokens":["SECRET"]}'],
        ["--connector-config", '{"dsn":"postgres:SECRET@host","key":"SECRET"}'],
        ["--connector-config", '{"license_key":"SECRET","env":["HF_TOKEN=SECRET"]}'],
        ["--connector-config", '{"sas":"SECRET","passwords":"SECRET"}'],
        ["--model", "s3://b?X-Amz-Signature=SECRET"],
        ["--model", "https://x/m?sig=SECRET"],
    ],
)
def test_a_log_and_a_command_line_show_no_secret_that_is_named_so(given):
    assert "SECRET" not in str(provenance.masked(given))
    assert "SECRET" in provenance.secrets_in(given)


def test_what_is_not_named_so_is_shown():
    shown = ["--max-num-batched-tokens", "8192", "--block-size", "16", "a=b:c", "K: v"]
    assert provenance.masked(shown) == shown
    assert provenance.secrets_in(shown) == []


def test_secrets_are_found_as_they_may_be_printed():
    config = {
        "password": 'ses"ame',
        "tokens": [{"token": 12_345, "auth": None}],
        "url": "redis://u:p%40ssword@cache",
        "secret": {"key": "line one\nline two"},
        "pin_code": "abc",
    }
    texts = provenance.secrets_in(config, ["--api-key", "of the server"])
    forms = {'ses"ame', 'ses\\"ame', "12345", "p%40ssword", "p@ssword", "line one"}
    assert forms | {"line two", "line one\\nline two", "of the server"} <= set(texts)
    # "abc" is found in anything, None was nobody's choice.
    assert not {"abc", "None", "u"} & set(texts)
    assert [len(text) for text in texts] == sorted(map(len, texts), reverse=True)


@pytest.mark.slow
def test_a_run_keeps_no_secret(tmp_path):
    _, connector = own_connector("mypkg.kv:Mine", '{"password": "sesame"}')
    profile = msgspec.structs.replace(
        load_profile("cpu"), own={"Mine": connector}, server_env={"ITS_TOKEN": "sesame"}
    )
    _begin_run(tmp_path, profile, installation(), [], None)
    assert "sesame" not in (tmp_path / PLAN_FILE).read_text()
    # Resumed with another password it is the same run.
    _begin_run(tmp_path, profile, installation(), [], None)


def test_a_time_per_token_is_no_secret():
    forward = {"us_per_token": 1.5, "us_per_context_token": 0.1, "us_per_pass": 3}
    assert provenance.masked(forward) == forward
    assert provenance.secrets_in(forward) == []
    names = ("hf_token", "per_tenant_token")
    assert provenance.masked(dict.fromkeys(names, "sesame")) == dict.fromkeys(
        names, "***"
    )


NEW = """\
[brand_new]
summary = "a connector that no code here has heard of"
patches = ["step_timing_v2"]

[brand_new.kv_transfer_config]
kv_connector = "BrandNewConnector"
kv_connector_module_path = "mypackage.kv"
kv_role = "kv_both"
"""


@pytest.fixture
def brand_new(tmp_path, monkeypatch):
    (tmp_path / "connectors").mkdir()
    (tmp_path / "connectors" / "any_file.toml").write_text(NEW)
    monkeypatch.setattr("kvtax.engine.connector.CONFIGS", tmp_path)
    return load_connector("brand_new")


def test_two_configs_of_a_name_are_refused(brand_new, tmp_path):
    (tmp_path / "connectors" / "second.toml").write_text(NEW)
    with pytest.raises(ConfigError, match=r"second\.toml: another .* has brand_new"):
        load_connector("brand_new")


def test_the_sweep_serves_it(brand_new, tmp_path):
    preflight.check_connector(brand_new)
    argv = resolve(brand_new, load_profile("cpu"), tmp_path, tmp_path, {}).argv
    given = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] == "BrandNewConnector"


SETTINGS = CONFIGS / "profiles" / "h20-30b-a3b.toml"


def test_the_fleet_launches_it_and_refuses_roles_until_its_toml_says_how_kv_moves(
    brand_new,
):
    settings = read_instance_settings(SETTINGS)
    spec = FleetSpec(settings, "brand_new", brand_new, ["both", "both"])
    made = members(spec, reserve(2), [[], []])
    assert [member.instance.connector for member in made] == [None, None]
    own = launch_spec.own_connector(spec, "both")
    assert own.kv_transfer_config["kv_role"] == "kv_both"
    apart = FleetSpec(settings, "brand_new", brand_new, ["prefill", "decode"])
    with pytest.raises(SpecError, match=r"brand_new.*`transfer`"):
        members(apart, reserve(2), [[], []])


def test_the_results_that_a_sweep_replaces_are_no_uncommitted_change(
    tmp_path, monkeypatch
):
    def dirty() -> bool:
        provenance._git.cache_clear()
        return provenance.collect({}, "kvtax")["git_dirty"]

    files = ("SUMMARY.md", "per_config.json", "figures/a.png", "code.py")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(provenance, "IN_CHECKOUT", True)
    try:
        assert not dirty()
        for name in files[:-1]:
            (tmp_path / name).write_text("new")
        assert not dirty()
        (tmp_path / "code.py").write_text("new")
        assert dirty()
    finally:
        provenance._git.cache_clear()


# Writes what it was told, and listens where it should, if it should.
MODULE = """
import os, pathlib, socket, sys, time
port, told, manner = sys.argv[1:]
pathlib.Path(told).with_suffix(".pid").write_text(str(os.getpid()))
pathlib.Path(told).with_suffix(".seen").write_text(pathlib.Path(told).read_text())
if manner == "dies":
    sys.exit("no more memory")
server = socket.create_server(("127.0.0.1", int(port)))
time.sleep(600)
"""


def companion_of(manner: str = "listens", module: str = "friend") -> Connector:
    return Connector(
        summary="with a companion",
        patches=[],
        kv_transfer_config={"extra": {"hosts": ["127.0.0.1:@PORT_1@"]}},
        env={"FRIEND_CONFIG": "@FOLDER@/friend.json"},
        companion=Companion(
            module=module,
            arguments=["@PORT_1@", "@FOLDER@/friend.json", manner],
            files={"friend.json": '{"port": @PORT_1@, "other": @PORT_2@}'},
        ),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "friend.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def pid_of(folder: Path) -> int:
    return int(content(folder / "friend.pid"))


@pytest.mark.slow
def test_it_listens_and_all_places_name_the_same_port(folder):
    with accompanied(companion_of(), folder, installation()) as given:
        # So that it ends whatever ends us: tests/proc/test_processes.py.
        supervisor = psutil.Process(pid_of(folder)).ppid()
        eventually(lambda: supervisor in supervisors())
        [address] = given.kv_transfer_config["extra"]["hosts"]
        port = int(address.removeprefix("127.0.0.1:"))
        seen = content(folder / "friend.seen")
        assert seen == f'{{"port": {port}, "other": {port + 1}}}'
        assert given.env == {"FRIEND_CONFIG": f"{folder}/friend.json"}
        assert not needs_company(given)


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, "the engine died"])
def test_it_ends_with_the_block_and_when_the_engine_fails(folder, error):
    with (
        pytest.raises(RuntimeError, match=error) if error else nullcontext(),
        accompanied(companion_of(), folder, installation()),
    ):
        pid = pid_of(folder)
        if error:
            raise RuntimeError(error)
    assert gone([pid])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("companion", "why"),
    [
        (companion_of("dies"), r"companion did not start(.|\n)*no more mem"),
        (companion_of(module="nobody_knows_it"), "No module named nobody_knows_it"),
    ],
)
def test_one_that_does_not_start_is_told_with_the_end_of_its_log(
    folder, companion, why
):
    with (
        pytest.raises(ServerError, match=why),
        accompanied(companion, folder, installation()),
    ):
        pass


def test_without_a_companion_the_folder_is_filled_in_all_the_same(folder):
    alone = Connector(
        summary="", patches=[], kv_transfer_config={"path": "@FOLDER@/kv", "blocks": 3}
    )
    with accompanied(alone, folder, installation()) as given:
        assert given.kv_transfer_config == {"path": f"{folder}/kv", "blocks": 3}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("config", ["", "null", "{}", '{"kv_role": null}', None])
def test_options_that_are_null_or_empty_are_as_if_not_given(config):
    assert own_connector("mypkg.kv:Mine", config) == own_connector(
        "mypkg.kv:Mine", None
    )


def test_offloading_gets_no_tier_of_files_that_nobody_asked_for():
    _, connector = own_connector("OffloadingConnector", None)
    assert "kv_connector_extra_config" not in connector.kv_transfer_config
