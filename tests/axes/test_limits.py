# SPDX-License-Identifier: Apache-2.0
"""The gate along the axes fails for what is beyond a limit, and for nothing else."""

from __future__ import annotations

import pytest

from kvtax.axes.axes import AXES
from kvtax.axes.limits import check_all, no_worse
from kvtax.config import ConfigError
from kvtax.cost.limits import read_limits
from tests.axes.cells import META, made
from tests.axes.test_fit import curve

METHOD = META.removesuffix("_us")


@pytest.fixture
def limits(tmp_path):
    def read(text: str):
        file = tmp_path / "limits.toml"
        file.write_text(text)
        return read_limits(file)

    return read


def outcomes(cell, limits) -> list[str]:
    return [check.outcome for check in check_all(cell, limits)]


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ("slope_us = { connector = 0.2 }", False),
        (f'slope_us = {{ "{METHOD}" = 0.2 }}', False),
        ("slope_us = { connector = 3.0 }", True),
        ("level_us = { connector = 400 }", False),
        ("level_us = { connector = 600 }", True),
        ('order = { connector = "constant" }', False),
        ('order = { connector = "linear" }', True),
        ('order = { connector = "quadratic" }', True),
    ],
)
def test_a_slope_a_level_and_an_order_can_be_limited(limits, limit, kept):
    # 2 us per running request.
    cell = made(running=curve("running", 1, 512.0))
    told = limits(f"[axes.running]\n{limit}\n")
    assert outcomes(cell, told) == ["kept" if kept else "broken"]


def test_what_cannot_be_told_is_undecided_and_passes(limits):
    cell = made(noise=0.8, running=curve("running", 1, 60.0))
    told = limits("[axes.running]\nslope_us = { connector = 0.2 }\n")
    (check,) = check_all(cell, told)
    assert (check.outcome, check.fails) == ("undecided", False)


def test_a_method_that_the_connector_has_not_is_refused_with_those_it_has(limits):
    told = limits("[axes.running]\nslope_us = { walk = 1.0 }\n")
    with pytest.raises(ConfigError, match=rf"'walk'; the connector has .*{METHOD}"):
        check_all(made(), told)


@pytest.mark.parametrize("text", ["[axes.speed]\n", "[axes.running]\nslope = 1\n"])
def test_an_unknown_axis_or_limit_is_refused(limits, text):
    with pytest.raises(ConfigError):
        limits(text)


def test_what_a_sweep_limits_stands_in_the_same_file(limits):
    assert limits('[default]\nundecided = "fail"\n[configs.a]\n').axes == {}


def test_new_growth_that_falls_again_is_broken_and_old_growth_of_that_kind_is_not():
    middle = AXES["running"].levels[2]
    cell = made(running=lambda level: 1_000.0 if level == middle else 10.0)
    broken = [check.what for check in no_worse(cell, made(), "abc") if check.fails]
    assert f"growth of {METHOD} along running, since abc" in broken
    assert not any(check.fails for check in no_worse(cell, cell, "abc"))


def test_new_growth_is_named_with_its_method_and_since_when():
    cell = made(running=curve("running", 1, 512.0))
    broken = [check.what for check in no_worse(cell, made(), "abc") if check.fails]
    assert f"slope of {METHOD} along running, since abc" in broken
    assert all("along running" in what for what in broken)


def test_old_growth_on_a_slower_machine_is_no_new_growth():
    old = made(running=curve("running", 1, 512.0))
    slower = made(running=curve("running", 1, 700.0))
    assert not any(check.fails for check in no_worse(slower, old, "abc"))
    twice = made(running=curve("running", 1, 1_100.0))
    assert any(check.fails for check in no_worse(twice, old, "abc"))


def test_an_axis_that_the_old_cell_has_not_is_not_compared():
    old = made()
    del old.levels["prompt"], old.means_us["prompt"]
    cell = made(prompt=curve("prompt", 1, 900.0))
    assert not any(check.fails for check in no_worse(cell, old, "abc"))
    assert any(check.fails for check in no_worse(cell, made(), "abc"))
