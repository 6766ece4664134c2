# SPDX-License-Identifier: Apache-2.0
"""Releases are compared by ratios over a no-op's, and a finished one is kept."""

from __future__ import annotations

import argparse
from contextlib import contextmanager

import pytest

from kvtax.axes.cell import Measured
from kvtax.axes.matrix import Choice, read_releases
from kvtax.axes.page import _in_turn
from kvtax.engine.installation import installation
from studies.observatory import releases


def measured(us: float) -> Measured:
    passes = [[us * drift, 2 * us * drift] for drift in (1.0, 1.5, 2.0, 1.2, 1.1, 0.9)]
    return Measured({"running": {"step_us": passes}})


def test_a_drift_of_the_machine_is_no_difference(tmp_path, monkeypatch, capsys):
    """All three engines of a pass are as slow as the machine is then."""
    started: list[int] = []

    def held(engines, folder, axes, limit_s):
        started.append(len(engines))
        if len(started) == 2:
            raise KeyboardInterrupt
        return [measured(100.0), measured(90.0), measured(150.0)]

    @contextmanager
    def installed(self, names):
        yield dict.fromkeys(names, installation())

    monkeypatch.setattr(releases, "held", held)
    monkeypatch.setattr(Choice, "installed", installed)
    out = tmp_path / "releases.json"
    given = argparse.Namespace(release=["0.33.0", "0.18.1"], out=out)
    with pytest.raises(KeyboardInterrupt):
        releases.run(given)
    kept = read_releases(out)
    assert [(row.release, row.connector) for row in kept] == [
        ("0.33.0", "plain"),
        ("0.33.0", "mooncake_both"),
    ]
    assert [row.first.value for row in kept] == pytest.approx([0.9, 1.5])
    assert kept[0].last.ci95 == pytest.approx((0.9, 0.9))
    assert releases.run(given) == 0
    rows = read_releases(out)
    assert [row.release for row in rows] == ["0.18.1"] * 2 + ["0.33.0"] * 2
    assert rows[2:] == kept
    assert "0.90 [0.90, 0.90]" in capsys.readouterr().out
    monkeypatch.setattr("kvtax.axes.page.read_releases", lambda: rows)
    assert ["0.33.0", "`plain`", "0.90 [0.90, 0.90]", "0.90 [0.90, 0.90]"] in (
        _in_turn().rows
    )
