# SPDX-License-Identifier: Apache-2.0
"""Runs the listener's cases and state machine, as patched and with each mutant.

Started by test_block_pool_listener.py on a tree with block_pool_delta_listener.
"""

import json
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from listener_cases import CASES
from listener_machine import PoolMachine
from listener_mutants import MUTANTS
from listener_variant import Variant

THOROUGH = settings(
    max_examples=200,
    stateful_step_count=100,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# The first failure is enough, and the same in every run.
QUICK = settings(
    THOROUGH,
    max_examples=60,
    phases=[Phase.generate],
    derandomize=True,
    report_multiple_bugs=False,
)


def failure(check: Callable[[], None]) -> str | None:
    """The end of what it raised, if anything."""
    try:
        check()
    except Exception:
        return traceback.format_exc()[-4_000:]
    return None


def machine(variant: Variant, effort: settings) -> Counter[str]:
    class Machine(PoolMachine):
        pass

    Machine.variant, Machine.counts = variant, Counter()
    run_state_machine_as_test(Machine, settings=effort)
    return Machine.counts


def failures_of(variant: Variant) -> dict[str, str]:
    """What fails, by name."""
    checks = {case.__name__: partial(case, variant) for case in CASES}
    checks["machine"] = partial(machine, variant, QUICK)
    found = {name: failure(check) for name, check in checks.items()}
    return {name: text for name, text in found.items() if text is not None}


def main() -> None:
    result = Path(sys.argv[2])
    logging.disable(logging.WARNING)  # each reset logs a line
    patched = Variant()
    found = {"failed": {}, "counts": {}, "killed_by": {}}
    for case in CASES:
        if text := failure(partial(case, patched)):
            found["failed"][case.__name__] = text
    try:
        found["counts"] = machine(patched, THOROUGH)
    except Exception:
        found["failed"]["machine"] = traceback.format_exc()
    if "mutants" in sys.argv[3:]:
        for name, mutant in MUTANTS.items():
            try:
                variant = Variant(**{mutant.file: mutant.edit})
            except Exception:
                found["killed_by"][name] = {"import": traceback.format_exc()[-4_000:]}
            else:
                found["killed_by"][name] = failures_of(variant)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
