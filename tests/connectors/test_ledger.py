# SPDX-License-Identifier: Apache-2.0
"""Direct read offers only what is written, and finds valid only what stayed so."""

from __future__ import annotations

import pytest
from ledger_mutants import MUTANTS
from patched_tree import run_script

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ledger")
    return run_script(folder, "ledger_script.py", ["block_pool_delta_listener"])


def test_ledger_on_the_real_block_pool(found):
    """ledger_cases.py one by one."""
    assert len(found["cases"]) > 15
    assert not found["failed"], "\n".join(found["failed"].values())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_cases_fail_when_one_thing_is_wrong(found, mutant):
    assert found["killed_by"][mutant]
