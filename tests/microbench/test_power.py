# SPDX-License-Identifier: Apache-2.0
"""What is said of the smallest growth that a run catches holds in known records."""

from __future__ import annotations

import polars as pl
import pytest
from lies import write_lies

from costs.power import __main__ as power

pytestmark = pytest.mark.slow

FLAT = [f"flat_{number}" for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_lies(folder, {name: {} for name in FLAT})
    return folder


def told(folder, monkeypatch, capsys, *arguments: str) -> str:
    flat = [word for name in FLAT for word in ("--flat", name)]
    monkeypatch.setattr("sys.argv", ["power", str(folder), *flat, *arguments])
    power.main()
    return capsys.readouterr().out


def test_growth_beyond_the_margin_is_caught_everywhere_and_less_is_not(
    folder, monkeypatch, capsys
):
    monkeypatch.setattr(power, "SLOPES", (1.0, 20.0))
    lines = told(folder, monkeypatch, capsys).splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines}
    for place in power.PLACES:
        assert rows[place].endswith("| 0% | 100% | 20 |")
    assert "of 4 (1 draws, 4 configs)" in lines[-1]


def test_growth_is_added_as_a_mean_over_the_steps_that_have_it(folder):
    _, (trial, *_) = power.load_run(folder)
    for times, share in power.PLACES.values():
        grown = power.grow(trial, (times, share), slope=20.0).steps
        own = trial.steps["prefills"] if share is power.PREFILLS else pl.lit(True)
        # The threads' time stands at the steps that end a sample.
        had = trial.steps.filter(own, pl.col(times[0]).is_not_null())
        more_us = grown.join(had, on="step_id").select(
            pl.col(times[0]) - pl.col(f"{times[0]}_right")
        )
        expected_us = 0.02 * had["cache_blocks"].mean()
        assert more_us.to_series().mean() == pytest.approx(expected_us, rel=0.02)


def test_a_config_that_is_not_in_the_run_is_refused(folder, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        told(folder, monkeypatch, capsys, "--flat", "nobody")
    assert "no config named nobody" in capsys.readouterr().err
