# SPDX-License-Identifier: Apache-2.0
"""Aborted and failed Mooncake transfers on a real engine, with and without the fixes.

Started by test_abort_race.py on a tree with mooncake_cpu_layout.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import vllm
from abort_scenarios import (
    NOTICES,
    RIGHT_UPSTREAM,
    SCENARIOS,
    Problems,
    aborted_before_scheduled,
    failed,
    prefiller_late_and_the_request_fails,
    pull_failed_and_fails_the_request,
)
from mooncake_world import LONG_TIMEOUT_S, PATIENCE_S, Code, MooncakeEngine, World
from variants import (
    CONNECTOR,
    SCHEDULER,
    STATS,
    block_ids,
    load,
    patch,
    patched_source,
)
from vllm.v1.outputs import KVConnectorOutput

RACE, DEFENCE = "kv_transfer_abort_race", "kv_transfer_abort_defence"
SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
FAILING = (pull_failed_and_fails_the_request, prefiller_late_and_the_request_fails)
STORM_PAIRS, STORM_SEEDS = 40, 2
STORM_TIMEOUT_S = 1
# Enough to see code go wrong that is expected to.
LITTLE_PATIENCE_S = 1.0


def run(
    engine: MooncakeEngine,
    code: Code,
    scenario: Callable[[World], Problems],
    policy: str | None = None,
    timeout_s: float = LONG_TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Problems:
    """What goes wrong in a world of that code, the engine's death included."""
    if policy is None:
        policy = "fail" if scenario in FAILING else "recompute"
    try:
        return scenario(World(engine, code, policy, timeout_s, patience_s))
    except Exception:
        return [traceback.format_exc(limit=-1)]


class Storm:
    """Pairs that come, meet and are aborted at random, each of them at any stage."""

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
                # At once is before it is scheduled.
                delay = chooser.choice((0, 0, 1, 2, 3, 5, 8, 13, 40))
                due[now + delay].append(partial(abort, request))

        for pair in range(STORM_PAIRS):
            # Not 1, which vLLM computes though it was pulled.
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


def expected_wrong(
    engine: MooncakeEngine, code: Code, scenario: Callable[[World], Problems]
) -> Problems:
    return run(engine, code, scenario, patience_s=LITTLE_PATIENCE_S)


def defence_reports(engine: MooncakeEngine, code: Code) -> dict:
    """What the scheduler makes of reports that no request waits for."""
    world = World(engine, code)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    code.scheduler.logger.addHandler(handler)
    running, aborted, sent = world.add(20, 400), world.decode("a"), world.prefill("s")
    received, waiting = world.decode("r"), world.decode("w")
    world.until(lambda: world.waiting_for_remote_kv(aborted, received, waiting))
    world.until(lambda: world.fates[sent].complete)
    world.abort(aborted)
    world.scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(
            finished_recving={"nobody", running, received, aborted},
            finished_sending={"no one", waiting, received, aborted, sent},
        )
    )
    names = {running: "running", waiting: "waiting"}
    found = {
        "logged": sorted(
            names.get(name, name)
            for name in (message.split(" of ")[-1] for message in messages)
        ),
        "freed": world.known([aborted, sent]) == [],
        "received": world.scheduler.finished_recving_kv_req_ids == {received},
        "kept": world.known([running, waiting]) == [running, waiting],
    }
    return found


def counted(stats: ModuleType) -> dict:
    """What the metrics make of a request that failed, and of one that was computed."""
    counts = stats.PromptTokenStats()
    for cached, prompt_len in ((-1, 500), (32, 100)):
        counts.update_from_output(cached, 0, prompt_len)
    return vars(counts)


def main() -> None:
    model, result = map(Path, sys.argv[1:])
    engine = MooncakeEngine(model)
    package = Path(vllm.__file__).parent

    with tempfile.TemporaryDirectory() as folder:

        def code(connector: tuple = (), scheduler: tuple = ()) -> Code:
            return Code(
                load(patched_source(package, CONNECTOR, connector, Path(folder))),
                load(patched_source(package, SCHEDULER, scheduler, Path(folder))),
            )

        upstream, race = code(), code([patch(RACE)])
        defence = code(scheduler=[patch(DEFENCE)])
        # As an operator runs it.
        fixed = code([patch(RACE), patch(SHORT_CIRCUIT)])
        race_without = {
            block: code([patch(RACE, without=block)])
            for block in block_ids(RACE, package, CONNECTOR)
        }
        defence_without = {
            block: code(scheduler=[patch(DEFENCE, without=block)])
            for block in block_ids(DEFENCE, package, SCHEDULER)
        }
        metrics = {
            name: load(patched_source(package, STATS, patches, Path(folder)))
            for name, patches in (("upstream", []), ("race", [patch(RACE)]))
        }
        # From here on nothing is parsed: garbage of a world may format a traceback,
        # and Python 3.11 cannot parse while it parses.
        found = {
            "right_upstream": {
                s.__name__: run(engine, upstream, s) for s in RIGHT_UPSTREAM
            },
            "wrong_upstream": {
                s.__name__: expected_wrong(engine, upstream, s)
                for s in SCENARIOS
                if s not in RIGHT_UPSTREAM
            },
            "storm_upstream": expected_wrong(engine, upstream, Storm(0)),
            "race": {s.__name__: run(engine, race, s) for s in SCENARIOS},
            "storm": {p: storms(engine, fixed, p) for p in ("recompute", "fail")},
            "counted": {name: counted(stats) for name, stats in metrics.items()},
            "defence": run(engine, defence, aborted_before_scheduled),
            "defence_reports": defence_reports(engine, defence),
        }
        found["race_without"] = {
            block: expected_wrong(engine, code, NOTICES[block])
            for block, code in race_without.items()
        }
        found["defence_without"] = {
            block: expected_wrong(engine, code, aborted_before_scheduled)
            for block, code in defence_without.items()
        }
    result.write_text(json.dumps(found, indent=1))
    # Worlds are left as they are; threads of theirs may wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
