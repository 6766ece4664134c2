# SPDX-License-Identifier: Apache-2.0
"""kvtax sweep --connector: when a sweep follows the gate, and with which exit code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtax.axes.gate import NotMeasured
from kvtax.cli import Exit, main

AXES = '[axes.running]\norder = { connector = "constant" }\n'


@pytest.fixture
def exit_code(monkeypatch, tmp_path):
    """Return the exit code and whether a sweep ran, for made-up outcomes of both."""

    def of(gate: bool | None, swept: Exit, limits: str = "") -> tuple[int, bool]:
        sweeps = []

        def made_up(_):
            if gate is None:
                raise NotMeasured("mine did not start")
            return SimpleNamespace(worse=gate)

        monkeypatch.setattr("kvtax.axes.gate.gate", made_up)
        monkeypatch.setattr("kvtax.axes.gate.markdown", str)
        monkeypatch.setattr(
            "microbench.command._measure", lambda *_: sweeps.append(1) or swept
        )
        file = tmp_path / "limits.toml"
        file.write_text(limits)
        options = ["--connector", "mine:Mine", "--limits", str(file)]
        return main(["sweep", *options]), bool(sweeps)

    return of


def test_a_limit_that_is_broken_on_either_side_ends_with_1(exit_code):
    assert exit_code(False, Exit.GOOD) == (Exit.GOOD, True)
    assert exit_code(True, Exit.GOOD) == (Exit.WORSE, True)
    assert exit_code(False, Exit.WORSE) == (Exit.WORSE, True)


def test_a_connector_that_the_gate_cannot_start_is_swept(exit_code):
    assert exit_code(None, Exit.GOOD) == (Exit.GOOD, True)
    assert exit_code(None, Exit.WORSE) == (Exit.WORSE, True)


def test_limits_along_axes_that_were_not_measured_do_not_pass(exit_code):
    assert exit_code(None, Exit.GOOD, AXES) == (Exit.NOT_MEASURED, False)


def test_help_of_run_all_names_every_option():
    import argparse
    import re

    from kvtax.paths import REPOSITORY
    from microbench import command

    parser = argparse.ArgumentParser()
    command.configure(parser)
    options = {name for action in parser._actions for name in action.option_strings}
    comment = (REPOSITORY / "run_all.sh").read_text().partition("\nset -euo")[0]
    assert options - {"-h", "--help"} <= set(re.findall(r"--[a-z-]+", comment))
