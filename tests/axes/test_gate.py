# SPDX-License-Identifier: Apache-2.0
"""The gate along the axes fails for what is beyond a limit, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtax.axes import gate
from kvtax.cli import main
from kvtax.config import ConfigError
from kvtax.records.files import read_document, write_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.verdict.axes import AXES, growth
from kvtax.verdict.limits import check_cell, check_since, read_limits
from tests.harness.made_up import META, made, slow_at
from tests.verdict.test_axes import curve

METHOD = META.removesuffix("_us")


@pytest.fixture
def limits(tmp_path):
    def read(text: str):
        file = tmp_path / "limits.toml"
        file.write_text(text)
        return read_limits(file)

    return read


def outcomes(cell, limits) -> list[str]:
    return [check.outcome for check in check_cell(cell, limits)]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ("slope_us = { connector = 0.2 }", False),
        (f'slope_us = {{ "{METHOD}" = 0.2 }}', False),
        ("slope_us = { connector = 3.0 }", True),
        ("level_us = { connector = 400 }", False),
        ("level_us = { connector = 600 }", True),
        ('shape = { connector = "flat" }', False),
        ('shape = { connector = "linear" }', True),
        ('shape = { connector = "curved" }', True),
    ],
)
def test_a_slope_a_level_and_a_shape_can_be_limited(limits, limit, kept):
    # 2 us per running request.
    cell = made(running=curve("running", 1, 512.0))
    parsed = limits(f"[axes.running]\n{limit}\n")
    assert outcomes(cell, parsed) == ["kept" if kept else "broken"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_cannot_be_decided_passes_unless_the_default_says_fail(limits, fails):
    cell = made(noise=0.8, running=curve("running", 1, 60.0))
    default = 'undecided = "fail"\n' if fails else ""
    parsed = limits(f"{default}[axes.running]\nslope_us = {{ connector = 0.2 }}\n")
    (check,) = check_cell(cell, parsed)
    assert (check.outcome, check.fails) == ("undecided", fails)


def test_a_method_that_the_connector_has_not_is_refused_with_those_it_has(limits):
    parsed = limits("[axes.running]\nslope_us = { walk = 1.0 }\n")
    with pytest.raises(ConfigError, match=rf"'walk'; the connector has .*{METHOD}"):
        check_cell(made(), parsed)


@pytest.mark.parametrize(
    "text",
    [
        "[axes.speed]\n",
        "[axes.running]\nslope = 1\n",
        "[axes.running]\nslope_us = { connector = nan }\n",
        "[configs.a]\nfull_adds = { timed = nan }\n",
    ],
)
def test_an_unknown_axis_or_limit_or_one_that_nothing_breaks_is_refused(limits, text):
    with pytest.raises(ConfigError):
        limits(text)


def test_a_limit_along_an_axis_that_was_not_measured_says_why(limits):
    cell = made()
    del cell.means_us["tier"]
    parsed = limits("[axes.tier]\nslope_us = { connector = 1.0 }\n")
    with pytest.raises(ConfigError, match="tier was not measured: mine has no reset_c"):
        check_cell(cell, parsed)


@pytest.fixture
def gated(tmp_path, monkeypatch, capsys):
    """Return the exit code and message of `kvtax gate mine:mine` with made-up cells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(
        gate, "_measure", lambda name, *_: made(running=curve("running", 1, 512.0))
    )
    write_document(tmp_path / "old.json", made())
    write_document(tmp_path / "other.json", made("theirs", release="0.30.0"))
    failed = msgspec.structs.replace(made(), means_us={}, error="no GPU")
    write_document(tmp_path / "failed.json", failed)
    (tmp_path / "torn.json").write_bytes((tmp_path / "old.json").read_bytes()[:500])
    (tmp_path / "sweep.toml").write_text('undecided = "fail"\n[axes.cache]\n')
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    (tmp_path / "wrong.toml").write_text("[axes.running]\nslope_us = { walk = 1 }\n")

    def of(*options: str) -> tuple[int, str]:
        return main(["gate", "mine:mine", *options]), capsys.readouterr().err

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--since", "none.json"], "none.json: missing"),
        (["--since", "torn.json"], "torn.json: "),
        (["--since", "other.json"], "other.json is of the connector theirs, not of mi"),
        (["--since", "failed.json"], "failed.json has no figures: no GPU"),
        (["--since", "."], ".: Is a directory"),
        (["--limits", "none.toml"], "none.toml: no such file"),
        (["--limits", "latin.toml"], "latin.toml: 'utf-8' codec"),
        (["--limits", "."], ".: Is a directory"),
        (["--limits", "sweep.toml"], "sweep.toml limits nothing along an axis"),
        (["--out", "no/cell.json"], "no/cell.json cannot be written"),
        (["--junit", "."], ". cannot be written"),
        (["--summary", "no/summary.md"], "no/summary.md cannot be written"),
    ],
)
def test_bad_files_are_refused_before_anything_is_measured(
    gated, options, why, monkeypatch
):
    monkeypatch.setattr(gate, "_measure", lambda *_: pytest.fail("measured"))
    code, said = gated(*options)
    assert code == 2
    assert said.startswith(f"kvtax: {why}")


def test_the_cell_is_kept_though_a_limit_names_a_method_that_is_not_there(gated):
    code, said = gated("--limits", "wrong.toml", "--out", "cell.json")
    assert code == 2 and "'walk'" in said
    assert read_document(Path("cell.json"), CellRecord).connector == "mine"


@pytest.mark.slow
def test_growth_since_another_release_names_that_release(gated, tmp_path, capsys):
    old = msgspec.structs.replace(made(), release="0.30.0")
    write_document(tmp_path / "old.json", old)
    assert main(["gate", "mine:mine", "--since", "old.json"]) == 1
    assert "since 2026-11-22 on vLLM 0.30.0" in capsys.readouterr().out


@pytest.mark.slow
def test_without_limits_nothing_is_passed(gated, capsys):
    assert main(["gate", "mine:mine"]) == 0
    said = capsys.readouterr().out
    assert "no limits given" in said and "passed" not in said


def test_the_margin_of_each_axis_stands_beside_its_slope():
    # 3.45 us per 1,000 tokens of a prompt are flat, as the margin is 6.
    cell = made(prompt=lambda tokens: 10 + 3.45 * tokens / 1_000)
    result = gate.GateResult(cell, [])
    text = gate.markdown(result)
    for along in AXES.values():
        assert f"| {along.margin_us:g} per {along.per_unit} |" in text
    rows = [line for line in text.splitlines() if "| +3.4" in line]
    assert rows and all("| flat |" in row for row in rows)


@pytest.mark.slow
def test_more_slow_steps_at_higher_levels_are_growth_that_no_mean_shows():
    cell = made()
    cell.holds["cache"] = slow_at(12_288, 16_384)
    rise = growth(cell, "cache", "connector_us")
    assert (rise.words, rise.exponent) == ("grows, rare", None)
    assert growth(cell, "cache", META).verdict == "flat"
    said = gate.markdown(gate.GateResult(cell, []))
    assert "12,288: 9, 16,384: 9 | 1,350 | **grows** |" in said
    assert [c.what for c in check_since(cell, made(), "abc") if c.fails] == [
        "growth of connector along cache, since abc"
    ]


def test_as_many_slow_steps_at_every_level_are_counted_and_are_no_growth():
    cell = made()
    cell.holds["cache"] = slow_at(*AXES["cache"].levels)
    assert growth(cell, "cache", "connector_us").verdict == "flat"
    assert "256: 9, 4,096: 9" in gate.markdown(gate.GateResult(cell, []))


def test_a_flat_shape_is_broken_by_rare_steps_and_a_linear_one_is_not_decided(limits):
    cell = made()
    cell.holds["cache"] = slow_at(16_384)
    flat = limits('[axes.cache]\nshape = { connector = "flat" }\n')
    linear = limits('[axes.cache]\nshape = { connector = "linear" }\n')
    assert outcomes(cell, flat) == ["broken"]
    assert outcomes(cell, linear) == ["undecided"]


def beside(threads: float, processes: float) -> CellRecord:
    """A cell with CPU time beside the engine, of so many us at the last level."""
    cell = made()
    for times in cell.means_us.values():
        levels = np.linspace(0, 1, len(times[META][0]))
        for name, us in (("threads_us", threads), ("processes_us", processes)):
            times[name] = [list(us * levels) for _ in times[META]]
    return cell


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_cpu_time_beside_the_engine_is_limited_and_compared_as_a_method_is(
    limits, name
):
    cell = beside(**{"threads": 0.0, "processes": 0.0, name: 1_000.0})
    parsed = limits(f"[axes.cache]\nslope_us = {{ {name} = 3 }}\n")
    assert outcomes(cell, parsed) == ["broken"]
    broken = [c.what for c in check_since(cell, beside(0, 0), "abc") if c.fails]
    assert f"slope of {name} along cache, since abc" in broken
    # An older cell that has no such time is no proof that it was less.
    assert not any(c.fails for c in check_since(cell, made(), "abc"))
    assert f"| `{name}_us` |" in gate.markdown(gate.GateResult(cell, []))


def test_what_a_sweep_limits_stands_in_the_same_file(limits):
    assert limits('undecided = "fail"\n[configs.a]\n').axes == {}


def test_new_growth_that_falls_again_is_broken_and_old_growth_of_that_kind_is_not():
    middle = AXES["running"].levels[2]
    cell = made(running=lambda level: 1_000.0 if level == middle else 10.0)
    broken = [check.what for check in check_since(cell, made(), "abc") if check.fails]
    assert f"growth of {METHOD} along running, since abc" in broken
    assert not any(check.fails for check in check_since(cell, cell, "abc"))


def test_new_growth_is_named_with_its_method_and_since_when():
    cell = made(running=curve("running", 1, 512.0))
    broken = [check.what for check in check_since(cell, made(), "abc") if check.fails]
    assert f"slope of {METHOD} along running, since abc" in broken
    assert all("along running" in what for what in broken)


def test_old_growth_on_a_slower_machine_is_no_new_growth():
    old = made(running=curve("running", 1, 512.0))
    slower = made(running=curve("running", 1, 700.0))
    assert not any(check.fails for check in check_since(slower, old, "abc"))
    twice = made(running=curve("running", 1, 1_100.0))
    assert any(check.fails for check in check_since(twice, old, "abc"))


@pytest.mark.slow
def test_an_axis_that_the_old_cell_has_not_is_not_compared():
    old = made()
    del old.levels["prompt"], old.means_us["prompt"]
    cell = made(prompt=curve("prompt", 1, 900.0))
    assert not any(check.fails for check in check_since(cell, old, "abc"))
    assert any(check.fails for check in check_since(cell, made(), "abc"))
