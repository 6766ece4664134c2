# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with and without the short-circuit, on real event loops.

Lockstep: two workers get the same events at the same time, and every step must report
the same. The clock is made up, so that entries expire to the instant, and each event is
over on both sides before the next step.

Stress: requests finish, fail and expire at random while steps run freely. One thread
takes steps as fast as an engine does, another is the network, and the connector's loops
and sender threads are between them. The report of each step is judged afterwards
against the events that were known when it began.
"""

from __future__ import annotations

import asyncio
import bisect
import queue
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm
from mooncake_tables import EDITS
from mooncake_world import (
    SENDER_THREADS,
    WAIT_S,
    Code,
    MooncakeEngine,
    Party,
    World,
    set_timeout,
)
from variants import CONNECTOR, edited, graft, load, patch, patched_source
from vllm.v1.core.sched import scheduler

from kvtax.paths import REPOSITORY

STEPS = 400
MOST_SENDING = SENDER_THREADS // 2


class Clock:
    """Stands in for the module `time` of the connector."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def perf_counter(self) -> float:
        return self.now_s


class Lockstep:
    """Random events for two workers, upstream's and another, from one seed."""

    def __init__(self, upstream: Party, other: Party, seed: int) -> None:
        self._upstream, self._other = upstream, other
        self._parties = (upstream, other)
        self._chooser = random.Random(seed)
        self._clock = Clock()
        self._names = iter(f"r{number}" for number in range(STEPS * 10))
        self._registered: set[str] = set()
        self._asked_early: dict[str, list] = {}
        self._expires_s: dict[str, float] = {}
        self._sending: dict[str, list] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> Lockstep:
        modules = [party.module for party in self._parties]
        for module in modules:
            module.time = self._clock
        try:
            for step in range(STEPS):
                for _ in range(self._chooser.randrange(4)):
                    self._event()
                self._both("let_loops_idle")
                self._compare(step)
        finally:
            for module in modules:
                module.time = time
        return self

    def _event(self) -> None:
        events = [self._time_passes]
        if self._upstream.sends:
            events += [self._register, self._record, self._pull, self._end, self._abort]
        if self._upstream.receives:
            events += [self._receive]
        self._chooser.choice(events)()

    def _both(self, call: str, *arguments: Any, **options: Any) -> list:
        return [getattr(p, call)(*arguments, **options) for p in self._parties]

    def _pick(self, names) -> str | None:
        return self._chooser.choice(sorted(names)) if names else None

    def _time_passes(self) -> None:
        later = [s for s in self._expires_s.values() if s > self._clock.now_s]
        if later and self._chooser.random() < 0.5:
            # To the instant, at which it has not expired yet.
            self._clock.now_s = self._chooser.choice(later)
        else:
            self._clock.now_s += self._chooser.random()

    def _register(self) -> None:
        name = next(self._names)
        if self._chooser.random() < 0.3:  # the decoder was faster
            self._asked_early[name] = self._both("pull", name)
        self._both("step", registered=[name])
        self._registered.add(name)

    def _record(self) -> None:
        if (name := self._pick(self._registered)) is None:
            return
        if name in self._asked_early and len(self._sending) == MOST_SENDING:
            return
        self._registered.remove(name)
        timeout_s = self._chooser.choice((0.5, 1, 2, 5))
        set_timeout(timeout_s)
        self._both("step", ready=[name])
        self._expires_s[name] = self._clock.now_s + timeout_s
        self.counts["records"] += 1
        if name in self._asked_early:
            self._both("wait_sending", name)
            self._sending[name] = self._asked_early.pop(name)
        self._both("let_loops_idle")  # the timeout is read on the loop
        set_timeout(1_000)

    def _pull(self) -> None:
        name = self._pick(self._expires_s.keys() - self._sending.keys())
        if name is not None and len(self._sending) < MOST_SENDING:
            self._sending[name] = self._both("pull", name)
            self._both("wait_sending", name)

    def _end(self) -> None:
        if (name := self._pick(self._sending)) is not None:
            status = self._chooser.choice((0, 0, -1))
            self._both("end_transfer", name, status)
            for future in self._sending.pop(name):
                future.result(WAIT_S)
            if status == 0:
                del self._expires_s[name]

    def _abort(self) -> None:
        if (name := self._pick(self._registered)) is not None:
            self._registered.remove(name)
            self._asked_early.pop(name, None)
            self._both("step", not_processed=[name])

    def _receive(self) -> None:
        names = [next(self._names) for _ in range(self._chooser.randrange(1, 4))]
        cut = self._chooser.randrange(len(names) + 1)
        for future in self._both("receive", names[:cut], names[cut:]):
            future.result(WAIT_S)

    def _compare(self, step: int) -> None:
        asked = self._other.asks
        expected, found = self._both("report")
        if expected != found:
            self.problems.append(f"step {step}: {found}, upstream {expected}")
        expired = self._expires_s.keys() & (expected[0] or set())
        for name in expired:
            del self._expires_s[name]
        self.counts["reports"] += any(expected)
        self.counts["expiries"] += len(expired)
        # An entry that expires while it is being sent has to be asked after.
        due = any(s <= self._clock.now_s for s in self._expires_s.values())
        self.counts["asks_in_vain"] += (
            self._other.asks > asked and not any(expected) and not due
        )


TIMEOUT_S = 0.3
ARRIVALS_S = 0.5
REQUESTS = 100
# How much later than its timeout a stuck send may be reported.
EXPIRY_TOLERANCE_S = 1.0
PATIENCE_S = 15.0
FATES = ("sent", "failed", "slow", "slow_failed", "stuck", "aborted", "received")


class Stress:
    """One run; `problems` is what was lost, doubled, early or late."""

    def __init__(self, party: Party, seed: int) -> None:
        self._party = party
        self._chooser = random.Random(seed)
        self._for_step: SimpleQueue = SimpleQueue()
        self._plan: list[tuple[float, partial]] = []
        self._began_s: list[float] = []
        self.reported: dict[str, tuple[int, float]] = {}
        self._known_s: dict[str, float] = {}
        self._recorded_s: dict[str, float] = {}
        self._failed_s: dict[str, float] = {}
        self._expected: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        for number in range(REQUESTS):
            self._plan_request(number)

    def _plan_request(self, number: int) -> None:
        party, chooser = self._party, self._chooser
        fates = [*FATES[:-1]] * party.sends + ["received"] * 4 * party.receives
        fate = chooser.choice(fates)
        name, start_s = f"{fate}-{number}", chooser.random() * ARRIVALS_S
        self.counts[fate] += 1
        if fate != "aborted":
            self._expected.add(name)
        if fate == "received":
            self._at(start_s, self._receive, name)
            return
        ready_s = start_s + 0.05 * chooser.random()
        self._at(start_s, self._for_step.put, ("registered", name))
        if fate == "aborted":
            self._at(ready_s, self._for_step.put, ("not_processed", name))
            return
        self._at(ready_s, self._for_step.put, ("ready", name))
        if fate != "stuck":
            # Before it is ready, or after.
            pull_s = start_s + 0.1 * chooser.random()
            slow_s = TIMEOUT_S + 0.1 if fate.startswith("slow") else 0.01
            status = -1 if fate.endswith("failed") else 0
            self._at(pull_s, self._pull, name)
            end_s = max(pull_s, ready_s) + slow_s * (1 + chooser.random())
            self._at(end_s, party.end_transfer, name, status)

    def _at(self, when_s: float, call, *arguments) -> None:
        self._plan.append((when_s, partial(call, *arguments)))

    # The network's thread, and what it leaves to the loops.

    def _network(self) -> None:
        start_s = time.perf_counter()
        for when_s, action in sorted(self._plan, key=lambda entry: entry[0]):
            time.sleep(max(0.0, start_s + when_s - time.perf_counter()))
            action()

    def _receive(self, name: str) -> None:
        self._party.receive([name]).add_done_callback(
            lambda future: self._known_s.update({name: future.result()})
        )

    def _pull(self, name: str) -> None:
        def answered(response) -> None:
            told = self._known_s if response.ok_reqs else self._failed_s
            told[name] = time.perf_counter()

        self._party.pull(name, answered)

    # The engine's thread.

    def run(self) -> Stress:
        set_timeout(TIMEOUT_S)
        network = threading.Thread(target=self._network)
        network.start()
        give_up_s = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < give_up_s and (
            network.is_alive() or len(self.reported) < len(self._expected)
        ):
            self._step()
        for _ in range(20):  # a doubled one would come now
            self._step()
        network.join()
        self._judge()
        return self

    def _next_metadata(self) -> dict[str, list[str]]:
        """What is due, but no request twice in a step, as from the scheduler."""
        due = [self._for_step.get() for _ in range(self._for_step.qsize())]
        metadata: dict[str, list[str]] = {}
        names: set[str] = set()
        for kind, name in due:
            if name in names:
                self._for_step.put((kind, name))
            else:
                metadata.setdefault(kind, []).append(name)
                names.add(name)
        return metadata

    def _step(self) -> None:
        metadata = self._next_metadata()
        now_s = time.perf_counter()
        self._recorded_s |= dict.fromkeys(metadata.get("ready", ()), now_s)
        if metadata:
            self._party.step(**metadata)
        self._began_s.append(time.perf_counter())
        for ids in self._party.report():
            for name in ids or ():
                if name in self.reported:
                    self.problems.append(f"{name} reported twice")
                self.reported[name] = len(self._began_s) - 1, time.perf_counter()
        if self._chooser.random() < 0.5:
            time.sleep(self._chooser.random() * 0.002)

    def _judge(self) -> None:
        if lost := self._expected - self.reported.keys():
            self.problems.append(f"lost: {sorted(lost)}")
        if more := self.reported.keys() - self._expected:
            self.problems.append(f"reported: {sorted(more)}")
        for name, (step, at_s) in self.reported.items():
            if (known_s := self._known_s.get(name)) is not None:
                if step > bisect.bisect(self._began_s, known_s):
                    self.problems.append(f"{name} not reported by the step after")
            elif name in self._recorded_s:
                late_s = at_s - self._recorded_s[name] - TIMEOUT_S
                tolerated_s = EXPIRY_TOLERANCE_S
                if name in self._failed_s:
                    tolerated_s += max(
                        0.0, self._failed_s[name] - self._recorded_s[name] - TIMEOUT_S
                    )
                if not 0 <= late_s <= tolerated_s:
                    self.problems.append(f"{name} reported {late_s:.3f} s late")


SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
LOCKSTEP_SEEDS = 4
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
        roles = ROLES if release == "installed" else ["kv_both"] * 2
        for seed, role in enumerate(roles):
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


def asks_in_the_engine(bench: Bench, version: str, steps: int) -> int:
    """How often decode-only steps of an engine ask the worker's event loops.

    From 0.30 on the engine calls get_transfer_results, which calls get_finished.
    """
    World(bench.engine, Code(bench.module("installed", version), scheduler))
    ids = bench.engine.decode_batch(4, steps)
    asked, ask = [], asyncio.run_coroutine_threadsafe

    def counted(coroutine, loop):
        asked.append(coroutine.__qualname__)
        return ask(coroutine, loop)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", counted)
        bench.engine.time(steps)
    bench.engine.end_batch(ids)
    return sum("fetch_finished" in name for name in asked)


def stuck_send_in_the_engine(bench: Bench) -> dict:
    """A prefill whose blocks nobody pulls, while other requests keep it stepping."""
    code = Code(bench.module("installed", "patched"), scheduler)
    world = World(bench.engine, code, timeout_s=1)
    prefill = world.prefill("t")
    world.until(lambda: world.fates[prefill].complete)
    began_s, steps_s = time.monotonic(), []

    def freed() -> bool:
        steps_s.append(time.monotonic() - began_s)
        return not world.known([prefill])

    world.until(freed)
    world.prefill("u")
    decode = world.decode("u")
    problems = world.settle()
    return {
        "taken_s": steps_s[-1],
        "steps_after_timeout": sum(step_s > 1.0 for step_s in steps_s),
        "problems": problems,
        "pulled_tokens": world.fates[decode].pulled_tokens,
    }
