# SPDX-License-Identifier: Apache-2.0
"""A sweep of synthetic costs in real servers gives each the expected verdict."""

from __future__ import annotations

import subprocess

import pytest

from kvtax.paths import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(7_200)]


def test_every_synthetic_cost_gets_its_expected_verdict(tmp_path):
    command = ["bash", REPOSITORY / "run_all.sh", "--profile", "synthetic"]
    sweep = subprocess.run(
        [*command, "--out", tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    named = [line for line in sweep.stdout.splitlines() if ": expected " in line]
    assert sweep.returncode == 0, "\n".join(named) or sweep.stdout
