# SPDX-License-Identifier: Apache-2.0
"""Direct read never accepts a wrong byte; without either safeguard it does."""

from __future__ import annotations

import json

import pytest
from patched_tree import run_script

pytestmark = pytest.mark.long

DURATION_S = 20.0
ENOUGH_WRONG = 20
# One step at a time, and two in flight as under async scheduling.
DEPTHS = (1, 2)
CONTROLS = ("without exclusion", "without validation")
RUNS = [
    [ledger, depth, DURATION_S, ENOUGH_WRONG]
    for ledger in ("as it is", *CONTROLS)
    for depth in DEPTHS
]


@pytest.fixture(scope="module")
def storms(tmp_path_factory) -> dict[tuple[str, int], dict[str, int]]:
    found = run_script(
        tmp_path_factory.mktemp("storm"),
        "storm_script.py",
        ["block_pool_delta_listener"],
        json.dumps(RUNS),
    )
    return {(run[0], run[1]): counts for run, counts in zip(RUNS, found, strict=True)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_wrong_byte_is_accepted(storms, depth):
    counts = storms["as it is", depth]
    assert counts["wrong"] == 0, counts
    # What makes it hard was there.
    assert counts["accepted"] > 1_000, counts
    assert counts["blocks_evicted"] > 100, counts
    assert counts["stopped_in_flight"] > 100, counts
    assert counts["resets"] > 0, counts


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ledger", CONTROLS)
def test_without_a_safeguard_wrong_bytes_are_accepted(storms, ledger, depth):
    counts = storms[ledger, depth]
    assert counts["wrong"] >= ENOUGH_WRONG, counts
