# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with and without the short-circuit, on real event loops.

Started by test_short_circuit.py on a tree with mooncake_cpu_layout; its argument is a
later release's package, for get_transfer_results.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import vllm
from mooncake_party import Party, set_timeout
from mooncake_world import Code, MooncakeEngine, World
from short_circuit_lockstep import Lockstep
from short_circuit_stress import Stress
from variants import (
    CONNECTOR,
    block_ids,
    edited,
    graft,
    load,
    patch,
    patched_source,
)
from vllm.v1.core.sched import scheduler

SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOCKSTEP_SEEDS, STRESS_SEEDS = 4, 2
QUIET_STEPS = 200

# What get_transfer_results reports from, in the releases that have it.
LATER_METHODS = (
    "fetch_finished_recving_reqs",
    "fetch_finished_sending_reqs",
    "get_finished",
    "get_transfer_results",
    "record_send_reqs",
    "process_pulling_result",
    "_handle_failed_recv",
    "_complete_pull_task",
)
# What must not go unnoticed: (block, what stands there, what is put in its place).
EXPIRY = "self.next_send_expire_time <= time.perf_counter()"
EDITS = {
    "not asked after received": ("get_finished", "self.finished_recving_reqs", "False"),
    "not asked after sent": ("get_finished", "self.finished_sending_reqs", "False"),
    "not asked after expiry": ("get_finished", EXPIRY, "False"),
    "asked long before expiry": ("get_finished", EXPIRY, f"{EXPIRY} + 60"),
    "latest recorded instead of first to expire": (
        "expire_time",
        "    self.next_send_expire_time, send",
        "    send_meta.expire_time, send",
    ),
    "last left instead of first to expire": ("next_expire_time", "min(", "max("),
    "only those being sent are looked at": (
        "next_expire_time",
        "values())",
        "values() if send_meta.sending)",
    ),
}


class Bench:
    """The two versions of the module, and edited ones, for workers of one engine."""

    def __init__(self, engine: MooncakeEngine, package: Path, place: Path) -> None:
        self._config = engine.core.vllm_config
        self._package, self._place = package, place
        self.upstream = self.module()
        self.patched = self.module(patch(SHORT_CIRCUIT))

    def module(self, *patches) -> ModuleType:
        return load(patched_source(self._package, CONNECTOR, patches, self._place))

    def party(self, module: ModuleType, role: str = "kv_both", **options) -> Party:
        return Party(module, self._config, role, **options)

    def later(self, release: Path, *patches) -> ModuleType:
        """The module with the reporting methods of a later release."""
        module = self.module(*patches)
        file = release / CONNECTOR
        if patches:
            file = patched_source(release, CONNECTOR, patches, self._place)
        module.queue = queue
        module.KVConnectorTransferResults = SimpleNamespace
        graft(module, "MooncakeConnectorWorker", file, LATER_METHODS)
        return module

    def later_party(self, module: ModuleType, role: str) -> Party:
        party = self.party(module, role, report="get_transfer_results")
        party.worker._failed_recv_reqs = queue.Queue()
        party.worker._is_hma_required = True
        party.worker.xfer_stats = SimpleNamespace(
            record_kv_expired_req=lambda: None, record_failed_recv=lambda: None
        )
        return party


def lockstep(make: Callable[[str, str], Party], seeds: int, roles=ROLES) -> dict:
    problems, counts = [], Counter()
    for role in roles:
        for seed in range(seeds):
            run = Lockstep(make("upstream", role), make("patched", role), seed).run()
            problems += [f"{role}, seed {seed}: {problem}" for problem in run.problems]
            counts += run.counts
    return {"problems": problems, "counts": counts}


def stress(make: Callable[[str, str], Party], version: str, roles=ROLES) -> dict:
    problems, counts, reported = [], Counter(), []
    for role in roles:
        for seed in range(STRESS_SEEDS):
            run = Stress(make(version, role), seed).run()
            problems += [f"{role}, seed {seed}: {problem}" for problem in run.problems]
            counts += run.counts
            reported.append(sorted(run.reported))
    return {"problems": problems, "counts": counts, "reported": reported}


def asks_when_quiet(party: Party) -> dict[str, int]:
    """What a step asks of the event loops when it can hear nothing from them."""
    found = {}

    def steps(name: str) -> None:
        party.let_loops_idle()
        party.report()
        asked = party.asks
        for _ in range(QUIET_STEPS):
            party.report()
        found[name] = party.asks - asked

    steps("idle")
    set_timeout(60)
    party.step(registered=["a", "b", "c"])
    steps("registered")
    party.step(ready=["a", "b", "c"])
    steps("to be pulled")
    party.pull("a")
    party.wait_sending("a")
    steps("being sent")
    party.end_transfer("a", 0)
    time.sleep(0.05)
    steps("one sent, two to be pulled")
    set_timeout(0.05)
    party.step(registered=["d"])
    party.step(ready=["d"])
    party.let_loops_idle()
    time.sleep(0.06)
    steps("one expired, two to be pulled")
    party.receive(["e"]).result()
    steps("one received")
    return found


def stuck_send_in_the_engine(engine: MooncakeEngine, code: Code) -> dict:
    """A prefill whose blocks nobody pulls, while other requests keep it stepping."""
    world = World(engine, code, timeout_s=1)
    prefill = world.prefill("t")
    world.until(lambda: world.fates[prefill].complete)
    began_s = time.monotonic()
    world.until(lambda: not world.known([prefill]))
    taken_s = time.monotonic() - began_s
    world.prefill("u")
    decode = world.decode("u")
    problems = world.settle()
    return {
        "taken_s": taken_s,
        "problems": problems,
        "pulled_tokens": world.fates[decode].pulled_tokens,
    }


def noticed(bench: Bench, module: ModuleType) -> bool:
    """Whether a module is found not to behave like the patched one."""
    modules = {"upstream": bench.upstream, "patched": module}
    try:
        asks = asks_when_quiet(bench.party(module))
        run = lockstep(lambda name, role: bench.party(modules[name], role), 1)
    except Exception:
        traceback.print_exc()
        return True
    return bool(run["problems"]) or any(asks.values())


def main() -> None:
    model, result, later = map(Path, sys.argv[1:])
    engine = MooncakeEngine(model)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(engine, Path(vllm.__file__).parent, Path(folder))
        modules = {"upstream": bench.upstream, "patched": bench.patched}

        def make(version: str, role: str) -> Party:
            return bench.party(modules[version], role)

        mutants = {
            f"without {block}": patch(SHORT_CIRCUIT, without=block)
            for block in block_ids(SHORT_CIRCUIT, bench._package, CONNECTOR)
        }
        mutants |= {
            name: edited(patch(SHORT_CIRCUIT), *edit) for name, edit in EDITS.items()
        }
        mutated = {name: bench.module(mutant) for name, mutant in mutants.items()}
        of_later = {}
        if later.is_dir():
            of_later = {
                "upstream": bench.later(later),
                "patched": bench.later(later, patch(SHORT_CIRCUIT)),
            }

        def make_later(version: str, role: str) -> Party:
            return bench.later_party(of_later[version], role)

        # From here on nothing is parsed: garbage of a party may format a traceback,
        # and Python 3.11 cannot parse while it parses.
        found = {
            "lockstep": lockstep(make, LOCKSTEP_SEEDS),
            "stress": stress(make, "patched"),
            "stress_upstream": stress(make, "upstream"),
            "quiet": asks_when_quiet(bench.party(bench.patched)),
            "quiet_upstream": asks_when_quiet(bench.party(bench.upstream)),
            "stuck": stuck_send_in_the_engine(engine, Code(bench.patched, scheduler)),
            "mutants": {
                name: noticed(bench, module) for name, module in mutated.items()
            },
        }
        if of_later:
            found["later_lockstep"] = lockstep(make_later, LOCKSTEP_SEEDS)
            found["later_stress"] = stress(make_later, "patched", ["kv_both"])
            quiet = make_later("patched", "kv_both")
            found["later_quiet"] = asks_when_quiet(quiet)
    result.write_text(json.dumps(found, indent=1))
    # Workers are left as they are; threads of theirs wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
