# SPDX-License-Identifier: Apache-2.0
"""A new connector takes one TOML: the sweep and the fleet launch it, unseen before."""

from __future__ import annotations

import json

import pytest

from kvtax.engine import preflight
from kvtax.engine.connector import load_connector
from kvtax.engine.ports import reserve
from kvtax.engine.server_spec import Engine, resolve
from kvtax.fleet.launch.instance_settings import read_instance_settings
from kvtax.fleet.launch.spec import FleetSpec, SpecError, members, own_connector
from kvtax.paths import CONFIGS
from microbench.profile import load_profile

NEW = """\
summary = "a connector that no code here has heard of"
patches = ["step_timing_v2"]

[kv_transfer_config]
kv_connector = "BrandNewConnector"
kv_connector_module_path = "mypackage.kv"
kv_role = "kv_both"
"""


@pytest.fixture
def brand_new(tmp_path, monkeypatch):
    (tmp_path / "connectors").mkdir()
    (tmp_path / "connectors" / "brand_new.toml").write_text(NEW)
    monkeypatch.setattr("kvtax.engine.connector.CONFIGS", tmp_path)
    return load_connector("brand_new")


def test_the_sweep_serves_it(brand_new, tmp_path):
    preflight.check_connector(brand_new)
    engine = Engine(tmp_path, load_profile("cpu"), brand_new, tmp_path)
    argv = resolve(engine, tmp_path, {}).argv
    told = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert told["kv_connector"] == "BrandNewConnector"


def test_the_fleet_launches_it(brand_new, tmp_path):
    settings = read_instance_settings(CONFIGS / "fleet" / "h20-30b-a3b.toml")
    spec = FleetSpec(settings, "brand_new", brand_new, ["both", "both"])
    made = members(spec, reserve(2), [[], []], tmp_path)
    assert [member.instance.connector for member in made] == [None, None]
    assert own_connector(spec, "both").kv_transfer_config["kv_role"] == "kv_both"


def test_roles_of_their_own_are_refused_until_its_toml_says_how_kv_moves(
    brand_new, tmp_path
):
    settings = read_instance_settings(CONFIGS / "fleet" / "h20-30b-a3b.toml")
    spec = FleetSpec(settings, "brand_new", brand_new, ["prefill", "decode"])
    with pytest.raises(SpecError, match=r"brand_new.*`transfer`"):
        members(spec, reserve(2), [[], []], tmp_path)
