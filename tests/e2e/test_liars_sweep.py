# SPDX-License-Identifier: Apache-2.0
"""Connectors that lie about their cost, in real servers: the sweep is not deceived."""

from __future__ import annotations

import subprocess

import pytest

from lab.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(7_200)]


def test_every_connector_gets_the_verdict_that_its_true_cost_deserves(tmp_path):
    command = ["bash", REPOSITORY / "run_all.sh", "--profile", "liars"]
    sweep = subprocess.run(
        [*command, "--out", tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    named = [line for line in sweep.stdout.splitlines() if ": expected " in line]
    assert sweep.returncode == 0, "\n".join(named) or sweep.stdout
