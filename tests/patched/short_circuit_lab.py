# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with and without the short-circuit, on real event loops."""

from __future__ import annotations

import queue
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vllm
from mooncake_party import Party, set_timeout
from mooncake_world import Code, MooncakeEngine, World
from short_circuit_lockstep import Lockstep
from short_circuit_stress import Stress
from short_circuit_tables import EDITS
from variants import CONNECTOR, edited, graft, load, patch, patched_source
from vllm.v1.core.sched import scheduler

from lab.paths import REPOSITORY

SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOCKSTEP_SEEDS, STRESS_SEEDS = 4, 2
QUIET_STEPS = 200
# The first release supported that has get_transfer_results.
LATER = REPOSITORY / "third_party" / "vllm-0.33.0" / "vllm"

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


class Bench:
    """Workers with the connector of one version, for the engine of this process.

    `release` is "installed", or "later" for one that has get_transfer_results, whose
    methods then run on the installed release's worker. `version` is "upstream" or
    "patched".
    """

    def __init__(self, engine: MooncakeEngine, place: Path) -> None:
        self.engine = engine
        self._place = place
        self.module = cache(self._module)
        self.lockstep = cache(self._lockstep)
        self.stress = cache(self._stress)

    def _module(self, release: str, version: str) -> ModuleType:
        patches = [patch(SHORT_CIRCUIT)] if version == "patched" else []
        module = self.patched(*patches)
        if release == "later":
            if hasattr(module.MooncakeConnectorWorker, "get_kv_connector_stats"):
                pytest.skip("the methods of 0.33.0 are tested on 0.18.1's worker")
            if not LATER.is_dir():
                where = LATER.relative_to(REPOSITORY)
                pytest.skip(f"no {where}: run make vllm-releases")
            file = patched_source(LATER, CONNECTOR, patches, self._place)
            module.queue = queue
            module.KVConnectorTransferResults = SimpleNamespace
            graft(module, "MooncakeConnectorWorker", file, LATER_METHODS)
        return module

    def patched(self, *patches) -> ModuleType:
        """The installed connector's module with these patches."""
        package = Path(vllm.__file__).parent
        return load(patched_source(package, CONNECTOR, patches, self._place))

    def party(self, release: str, version: str, role: str = "kv_both") -> Party:
        module = self.module(release, version)
        if release == "installed":
            return self.party_of(module, role)
        party = self.party_of(module, role)
        party.worker._failed_recv_reqs = queue.Queue()
        party.worker._is_hma_required = True
        party.worker.xfer_stats = SimpleNamespace(
            record_kv_expired_req=lambda: None, record_failed_recv=lambda: None
        )
        return party

    def party_of(self, module: ModuleType, role: str = "kv_both") -> Party:
        core = self.engine.core
        return Party(module, core.vllm_config, core.scheduler.kv_cache_config, role)

    def _lockstep(self, release: str) -> dict:
        """Upstream and patched told the same, in each role."""
        return lockstep(
            lambda role: [
                self.party(release, version, role)
                for version in ("upstream", "patched")
            ],
            LOCKSTEP_SEEDS,
        )

    def _stress(self, release: str, version: str) -> dict:
        """Free-running threads, in each role."""
        problems, counts, reported = [], Counter(), []
        for role in ROLES if release == "installed" else ["kv_both"]:
            for seed in range(STRESS_SEEDS):
                run = Stress(self.party(release, version, role), seed).run()
                problems += [f"{role}, seed {seed}: {text}" for text in run.problems]
                counts += run.counts
                reported.append(sorted(run.reported))
        return {"problems": problems, "counts": counts, "reported": reported}

    def notices(self, mutant) -> bool:
        """Whether a wrong form of the patch is found not to behave like upstream."""
        module = self.patched(mutant)
        try:
            asks = asks_when_quiet(self.party_of(module))
            run = lockstep(
                lambda role: [
                    self.party("installed", "upstream", role),
                    self.party_of(module, role),
                ],
                seeds=1,
            )
        except Exception:
            traceback.print_exc()
            return True
        return bool(run["problems"]) or any(asks.values())


def lockstep(make: Callable[[str], list[Party]], seeds: int) -> dict:
    problems, counts = [], Counter()
    for role in ROLES:
        for seed in range(seeds):
            run = Lockstep(*make(role), seed).run()
            problems += [f"{role}, seed {seed}: {problem}" for problem in run.problems]
            counts += run.counts
    return {"problems": problems, "counts": counts}


def mutant(name: str):
    """The patch with one thing wrong, or with the block of that name left out."""
    if name in EDITS:
        return edited(patch(SHORT_CIRCUIT), *EDITS[name])
    return patch(SHORT_CIRCUIT, without=name)


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


def stuck_send_in_the_engine(bench: Bench) -> dict:
    """A prefill whose blocks nobody pulls, while other requests keep it stepping."""
    code = Code(bench.module("installed", "patched"), scheduler)
    world = World(bench.engine, code, timeout_s=1)
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
