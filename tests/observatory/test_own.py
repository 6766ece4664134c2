# SPDX-License-Identifier: Apache-2.0
"""run_all.sh --connector: when a sweep follows the axes, and with which status."""

from __future__ import annotations

import sys

import pytest

from microbench import sweep
from observatory import gate, own

AXES = '[axes.running]\norder = { connector = "constant" }\n'


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """The status, and whether a sweep was made, if the axes and it end as told."""

    def of(along_axes: int, swept: int, limits: str = "") -> tuple[int, bool]:
        sweeps = []
        monkeypatch.setattr(gate, "main", lambda told: along_axes)
        monkeypatch.setattr(sweep, "main", lambda: sweeps.append(1) or swept)
        file = tmp_path / "limits.toml"
        file.write_text(limits)
        told = ["run_all", "--connector", "mine:Mine", "--limits", str(file)]
        monkeypatch.setattr(sys, "argv", told)
        return own.main(), bool(sweeps)

    return of


def test_a_limit_that_is_broken_on_either_side_ends_with_1(ended):
    assert ended(gate.KEPT, 0) == (0, True)
    assert ended(gate.BROKEN, 0) == (1, True)
    assert ended(gate.KEPT, 1) == (1, True)


def test_what_is_told_wrongly_is_not_swept(ended):
    assert ended(gate.BAD_INPUT, 0) == (gate.BAD_INPUT, False)


def test_a_connector_that_cannot_be_held_at_the_levels_is_swept(ended):
    assert ended(gate.NOT_STARTED, 0) == (0, True)
    assert ended(gate.NOT_STARTED, 1) == (1, True)


def test_limits_along_axes_that_nobody_could_look_at_do_not_pass(ended):
    assert ended(gate.NOT_STARTED, 0, AXES) == (gate.NOT_STARTED, False)
