# SPDX-License-Identifier: Apache-2.0
"""`kvtax look` says what the connector costs, and names the remedy of a known cost."""

from __future__ import annotations

import pytest

from kvtax.cli import main as main_of_kvtax
from kvtax.cli.look import PAGE
from kvtax.look.answer import known_costs
from kvtax.look.demo import RECORDS
from kvtax.look.instance_summary import COVARIATES
from kvtax.paths import PATCHES
from tests.look.made_up_server import Server
from tests.look.test_look_input import main

SHORT_CIRCUIT = "kvtax run --fix mooncake_get_finished_short_circuit -- vllm serve"


def server(folder, get_finished_us: float, connectors: list[str]) -> Server:
    made = Server(folder, header={"connectors": connectors} if connectors else {})
    for _ in range(400):
        made.step(get_finished_us=get_finished_us)
    return made


@pytest.mark.parametrize(
    ("us", "connectors", "shows"),
    [
        (219.0, ["MooncakeConnector"], True),
        (219.0, [], True),
        (219.0, ["NixlConnector"], False),
        (3.0, ["MooncakeConnector"], False),
    ],
)
def test_a_known_cost_has_its_remedy_in_terminal_and_page(
    us, connectors, shows, tmp_path, capsys
):
    folder = server(tmp_path / "r", us, connectors).write()
    assert main([str(folder)]) == 0
    told = capsys.readouterr().out
    assert (SHORT_CIRCUIT in told) is shows
    assert (SHORT_CIRCUIT in (folder / PAGE).read_text()) is shows
    assert "nixl_push_idle_wake" not in told
    assert ("if it is MooncakeConnector's" in told) is (shows and not connectors)


def test_the_sentence_has_connector_cost_and_share(tmp_path, capsys):
    folder = server(tmp_path / "r", 219.0, ["MooncakeConnector"]).write()
    assert main([str(folder)]) == 0
    # 5 of build_connector_meta and 219 of get_finished in 2,389 us.
    told = capsys.readouterr().out
    assert "MooncakeConnector adds 224.0 µs to a step of 2,384 µs" in told
    assert "most of it worker.get_finished (219.0 µs)" in told


def test_a_walk_of_the_cache_is_named(tmp_path, capsys):
    made = Server(tmp_path / "r", header={"connectors": ["ForkOfMooncake"]})
    for number in range(4_000):
        blocks = 200 * abs(number % 200 - 100)
        made.step(build_meta_us=5 + blocks * 0.08, cache_size=blocks)
    assert main([str(made.write())]) == 0
    told = capsys.readouterr().out
    assert "scheduler.build_connector_meta (80 µs per 1,000 cached blocks)" in told


def test_known_costs_name_patches_and_axes_that_exist():
    for cost in known_costs():
        assert not cost.patch or (PATCHES / cost.patch / "patch.toml").exists()
        assert cost.moves_with is None or cost.moves_with in COVARIATES


def test_the_demo_shows_a_walk_its_fix_and_an_h100(tmp_path, capsys):
    assert main_of_kvtax(["demo", "--out", str(tmp_path / "demo")]) == 0
    told = capsys.readouterr().out
    assert "scheduler.build_connector_meta (" in told and "docs/fixes.md" in told
    assert SHORT_CIRCUIT in told
    assert "Warnings" not in told
    page = (tmp_path / "demo" / PAGE).read_text()
    assert all(name in page for name in ("hash_walk", "fixed", "h100"))


def test_the_demo_is_small():
    assert RECORDS.stat().st_size <= 300_000
