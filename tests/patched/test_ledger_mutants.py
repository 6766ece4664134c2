# SPDX-License-Identifier: Apache-2.0
"""With one thing wrong in the ledger, one of its tests fails."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import test_ledger_blocks
import test_ledger_offers
from ledger_mutants import MUTANTS

from connectors.direct_read import ledger

PATCHES = ["block_pool_delta_listener"]
ONLY = "0.18.1"
TESTS = [
    function
    for module in (test_ledger_blocks, test_ledger_offers)
    for name, function in vars(module).items()
    if name.startswith("test_")
]


def mutant(old: str, new: str) -> types.ModuleType:
    """The ledger's module again, from its edited text."""
    text = Path(ledger.__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    module = types.ModuleType("mutant")
    # Dataclasses look their module up.
    sys.modules["mutant"] = module
    exec(compile(text.replace(old, new), ledger.__file__, "exec"), vars(module))
    return module


def fails(test: Callable, module: types.ModuleType) -> bool:
    try:
        test(module)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_ledger_with_one_thing_wrong_is_noticed(name):
    module = mutant(*MUTANTS[name])
    assert any(fails(test, module) for test in TESTS)
