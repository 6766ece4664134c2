# SPDX-License-Identifier: Apache-2.0
"""Runs the ledger's cases on it as it is, and with each mutant.

Started by test_ledger.py on a tree with block_pool_delta_listener.
"""

import json
import logging
import sys
import traceback
import types
from pathlib import Path

from ledger_cases import CASES
from ledger_mutants import MUTANTS

from connectors.direct_read import ledger


def mutant(old: str, new: str) -> types.ModuleType:
    """The ledger's module again, from its edited text."""
    text = Path(ledger.__file__).read_text()
    assert text.count(old) == 1, f"{text.count(old)} times: {old}"
    module = types.ModuleType("mutant")
    # Dataclasses look their module up.
    sys.modules["mutant"] = module
    exec(compile(text.replace(old, new), ledger.__file__, "exec"), vars(module))
    return module


def failures(module: types.ModuleType) -> dict[str, str]:
    found = {}
    for case in CASES:
        try:
            case(module)
        except Exception:
            found[case.__name__] = traceback.format_exc()[-4_000:]
    return found


def main() -> None:
    logging.disable(logging.ERROR)  # resets, and what mutants do
    found = {
        "cases": [case.__name__ for case in CASES],
        "failed": failures(ledger),
        "killed_by": {
            name: list(failures(mutant(*edit))) for name, edit in MUTANTS.items()
        },
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
