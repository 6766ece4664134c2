# SPDX-License-Identifier: Apache-2.0
"""Worlds of patched and unpatched Mooncake code in which transfers are aborted."""

from __future__ import annotations

import functools
import random
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import abort_answers
import abort_scenarios
import pytest
import vllm
from abort_scenarios import Problems, failed
from abort_tables import FAILING
from mooncake_shapes import reports_failed_pulls
from mooncake_world import LONG_TIMEOUT_S, PATIENCE_S, Code, MooncakeEngine, World
from variants import CONNECTOR, SCHEDULER, block_ids, load, patch, patched_source

PACKAGE = Path(vllm.__file__).parent
RACE, DEFENCE = "kv_transfer_abort_race", "kv_transfer_abort_defence"
SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
STORM_PAIRS, STORM_SEEDS = 40, 2
STORM_TIMEOUT_S = 1
# Long enough to see that code goes wrong where that is expected.
LITTLE_PATIENCE_S = 1.0


@functools.cache
def code(*names: str, without: str | None = None) -> Code:
    """vLLM's modules with these patches; `without` leaves out a block of the last."""
    patches = [patch(name) for name in names]
    if without is not None:
        patches[-1] = patch(names[-1], without=without)
    place = Path(tempfile.mkdtemp())
    return Code(
        *(
            load(patched_source(PACKAGE, f, patches, place))
            for f in (CONNECTOR, SCHEDULER)
        )
    )


def run(
    engine: MooncakeEngine,
    code: Code,
    scenario: str | Callable[[World], Problems],
    policy: str = "recompute",
    timeout_s: float = LONG_TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Problems:
    """What goes wrong in a world of that code, the engine's death included."""
    if isinstance(scenario, str):
        policy = "fail" if scenario in FAILING else policy
        module = abort_answers if hasattr(abort_answers, scenario) else abort_scenarios
        scenario = getattr(module, scenario)
    try:
        return scenario(World(engine, code, policy, timeout_s, patience_s))
    except Exception:
        return [traceback.format_exc(limit=-1)]


def needs_block(block: str, file: str = CONNECTOR) -> None:
    """Skip where the release needs no such block, or none has been made to fit it."""
    if block not in block_ids(RACE, PACKAGE, file):
        pytest.skip(f"the patch's block {block} is not for this release")


def needs_reports() -> None:
    """Skip where a pull that was refused leaves its request waiting, as upstream's."""
    if not reports_failed_pulls(code(RACE).connector):
        pytest.skip("this release's decoder does not report a failed pull")


def goes_wrong(engine: MooncakeEngine, code: Code, scenario) -> bool:
    return bool(run(engine, code, scenario, patience_s=LITTLE_PATIENCE_S))


class Storm:
    """Pairs that arrive, meet and are aborted at random, each at any stage."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._chooser = random.Random(seed)
        self._aborted: set[str] = set()
        self._decodes: list[str] = []

    def __call__(self, world: World) -> Problems:
        chooser, due, now = self._chooser, defaultdict(list), 0

        def abort(request: str) -> None:
            self._aborted.add(request)
            world.abort(request)

        def arrive(add: Callable[[str, int], str], transfer_id: str, tokens: int):
            request = add(transfer_id, tokens)
            if add == world.decode:
                self._decodes.append(request)
            if chooser.random() < 0.4:
                # A delay of 0 aborts the request before it is scheduled.
                delay = chooser.choice((0, 0, 1, 2, 3, 5, 8, 13, 40))
                due[now + delay].append(partial(abort, request))

        for pair in range(STORM_PAIRS):
            # Not 1: vLLM computes that token although it was pulled.
            tokens = chooser.choice((2, 15, 16, 17, 33, chooser.randint(2, 100)))
            for add in (world.prefill, world.decode):
                arrival = partial(arrive, add, f"t{pair}", tokens)
                due[chooser.randrange(60)].append(arrival)
        while due:
            while actions := due.pop(now, None):
                chooser.shuffle(actions)
                for action in actions:
                    action()
            world.step()
            now += 1
        return world.settle() + self._fates(world)

    def _fates(self, world: World) -> Problems:
        problems = []
        for request in self._decodes:
            fate = world.fates[request]
            if request in self._aborted:
                self.counts["aborted"] += 1
            elif fate.complete:
                self.counts["pulled" if fate.pulled_tokens else "recomputed"] += 1
            elif not world.scheduler.recompute_kv_load_failures and failed(
                world, request
            ):
                self.counts["failed"] += 1
            else:
                problems.append(f"{fate}: neither complete nor failed")
        return problems


def storms(engine: MooncakeEngine, code: Code, policy: str) -> dict:
    problems, counts = [], Counter()
    for seed in range(STORM_SEEDS):
        storm = Storm(seed)
        problems += run(engine, code, storm, policy, STORM_TIMEOUT_S)
        counts += storm.counts
    return {"problems": problems, "counts": counts}
