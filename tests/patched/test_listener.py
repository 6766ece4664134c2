# SPDX-License-Identifier: Apache-2.0
"""Listeners of vLLM's real block pool know exactly what it holds."""

from __future__ import annotations

from pathlib import Path

import listener_cases
import pytest
from listener_lab import QUICK, THOROUGH, check_explored, run_machine
from listener_tables import CASES, MUTANTS
from listener_variant import Variant
from vllm.v1.core import block_pool, block_pool_listener

PATCHES = ["block_pool_delta_listener"]


@pytest.mark.parametrize("case", CASES)
def test_listeners_and_trackers_know(case):
    getattr(listener_cases, case)(Variant())


def test_replicas_and_trackers_equal_the_pool_after_any_operations():
    check_explored(run_machine(Variant(), THOROUGH))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_one_thing_wrong_is_noticed(mutant):
    file, edit = MUTANTS[mutant]
    module = {"pool": block_pool, "listener": block_pool_listener}[file]
    text = edit(Path(module.__file__).read_text())
    with pytest.raises(Exception):  # noqa: B017 (however it shows)
        variant = Variant(**{file: lambda _: text})
        for case in CASES:
            getattr(listener_cases, case)(variant)
        run_machine(variant, QUICK)
