# SPDX-License-Identifier: Apache-2.0
"""Listeners know what the block pool of vLLM 0.22.1 holds, too.

Its Python files run with 0.18.1's dependencies.
"""

from __future__ import annotations

import listener_cases
import pytest
from listener_lab import THOROUGH, check_explored, run_machine
from listener_tables import CASES
from listener_variant import Variant

PATCHES = ["block_pool_delta_listener"]
RELEASE = "0.22.1"
ONLY = "0.18.1"


@pytest.mark.parametrize("case", CASES)
def test_listeners_and_trackers_know(case):
    getattr(listener_cases, case)(Variant())


def test_replicas_and_trackers_equal_the_pool_after_any_operations():
    check_explored(run_machine(Variant(), THOROUGH))
