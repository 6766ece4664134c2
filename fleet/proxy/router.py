# SPDX-License-Identifier: Apache-2.0
"""From a request to a decision: take a snapshot, ask the policy, remember the pin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec

from fleet.policies import POLICIES, Ask, Candidate, Decision, NoInstance, Snapshot
from lab.records.decisions import DecisionEnd
from lab.records.instances import Instance

from .body import PIECE_BYTES, Body
from .decision_log import DecisionLog
from .loads import FleetLoad
from .mirror import Mirror
from .pins import Pins
from .shared import SharedPins

Source = Literal["mirror", "exact"]


class Route(msgspec.Struct, frozen=True):
    """A decision, and by name what each instance would have to compute."""

    decision: Decision
    prompt_tokens: int
    new_tokens: dict[str, int]


class Router:
    """Decides, and sends nothing.

    `difference_tokens` sums up by how much the mirror and the exact state disagree
    about a prompt at the instance that got it; `differences` counts those prompts.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        policy: str,
        parameters: msgspec.Struct,
        mirror: Mirror,
        loads: FleetLoad,
        pins: Pins | SharedPins,
        log: DecisionLog,
        now_ns: Callable[[], int],
    ) -> None:
        self._instances = instances
        self._place = {one.name: place for place, one in enumerate(instances)}
        self._decide = POLICIES[policy]
        self._parameters = parameters
        self._mirror = mirror
        self._loads = loads
        self._log = log
        self._now_ns = now_ns
        self._pins = pins
        self.difference_tokens = [0] * len(instances)
        self.differences = [0] * len(instances)
        self.decision_us: deque[float] = deque(maxlen=10_000)

    def route(
        self,
        end: DecisionEnd,
        body: Body,
        exact: list[int] | None,
        attempt: int,
        without: Collection[str],
    ) -> Route:
        """Decide, log it and remember it. Raises NoInstance.

        `exact` is what each instance has cached of the prompt, in tokens; None where
        the mirror has to do. `without` are the instances not to consider.
        """
        keys = body.keys()
        start_ns = self._now_ns()
        mirrored = self._mirrored(body, keys)
        cached = mirrored if exact is None else exact
        ask = Ask(end.session, body.prompt_tokens)
        snapshot = self._snapshot(end.session, cached, without)
        decision = self._decide(ask, snapshot, self._parameters)
        decision_us = (self._now_ns() - start_ns) / 1000
        self.decision_us.append(decision_us)
        place = self._place[decision.instance]
        if exact is not None:
            self.differences[place] += 1
            self.difference_tokens[place] += abs(mirrored[place] - exact[place])
        source: Source = "mirror" if exact is None else "exact"
        self._log.decided(
            end, attempt, ask, snapshot, decision, body.form, source, decision_us
        )
        self._loads.decided(attempt == 0, decision.prefill is not None)
        self._remember(end.session, body, keys, decision)
        new = {
            one.name: max(0, ask.prompt_tokens - one.cached_tokens)
            for one in snapshot.candidates
        }
        return Route(decision, ask.prompt_tokens, new)

    def _mirrored(self, body: Body, keys: list[int]) -> list[int]:
        depths = self._mirror.depths(keys)
        tokens = {depth: body.tokens_in(depth) for depth in set(depths)}
        return [tokens[depth] for depth in depths]

    def _snapshot(
        self, session: str | None, cached: list[int], without: Collection[str]
    ) -> Snapshot:
        totals = self._loads.totals()
        candidates = []
        for place, one in enumerate(self._instances):
            if one.name in without:
                continue
            load = totals.instances[place]
            candidates.append(
                Candidate(
                    one.name,
                    one.role,
                    load.requests,
                    load.ongoing_tokens,
                    load.pending_prefill_tokens,
                    cached[place],
                    one.kv_tokens,
                )
            )
        if not candidates:
            raise NoInstance("no healthy instance")
        pin = self._pins.of(session)
        return Snapshot(
            candidates,
            pin and pin.instance,
            totals.arrivals,
            totals.offloads,
            totals.offloaded,
            pin.turns if pin else 0,
            pin and pin.at_tokens,
        )

    def _remember(
        self, session: str | None, body: Body, keys: list[int], decision: Decision
    ) -> None:
        tokens = PIECE_BYTES * body.prompt_tokens / max(1, len(body.prompt))
        for name in {decision.instance, decision.prefill} - {None}:
            self._mirror.add(self._place[name], keys, tokens)
        self._pins.note(session, decision.instance, body.prompt_tokens)
