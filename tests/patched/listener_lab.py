# SPDX-License-Identifier: Apache-2.0
"""The listener's state machine, run thoroughly or until the first failure."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from listener_machine import PoolMachine
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


def run_machine(variant: Variant, effort: settings) -> Counter[str]:
    """Counts of the events in the run. Raises what the machine found wrong."""

    class Machine(PoolMachine):
        pass

    Machine.variant, Machine.counts = variant, Counter()
    run_state_machine_as_test(Machine, settings=effort)
    return Machine.counts


def check_explored(counts: Counter[str]) -> None:
    """The run had enough of every event that changes the pool."""
    assert counts["operations"] > 5_000
    assert counts["takes"] > 1_000
    assert counts["evictions"] > 1_000
    for event in (
        "duplicates",
        "hits",
        "preemptions",
        "resets",
        "refused resets",
        "late joins",
        "pops of nothing",
        "overflows",
        "wrong by walk",  # what the walk cannot see, and the tracker did
    ):
        assert counts[event] > 0, event
