# SPDX-License-Identifier: Apache-2.0
"""A worker whose requests finish, fail and expire at random while steps run freely.

Nothing waits for anything: one thread takes steps as fast as an engine does, another
is the network, and the connector's loops and sender threads are between them. What
each step reports is judged afterwards against what was known when it began.
"""

from __future__ import annotations

import bisect
import random
import threading
import time
from collections import Counter
from functools import partial
from queue import SimpleQueue

from mooncake_party import Party, set_timeout

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
