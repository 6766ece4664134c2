# SPDX-License-Identifier: Apache-2.0
"""From a request to a decision: take a snapshot, apply the policy, remember the pin.

The mirror is an estimate of what each instance has cached, from the decisions so far: a
bounded LRU of prompt pieces. It counts a prompt as cached from the moment it is routed,
and does not include generated tokens or evictions of the instance.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from kvtax_fleet.policies import POLICIES
from kvtax_fleet.policies.decision import Decision, NoInstance, RequestInfo
from kvtax_fleet.proxy.body import PIECE_BYTES, RequestBody
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.loads import FleetLoad
from kvtax_fleet.proxy.pins import Pins
from kvtax_fleet.records.decisions import Candidate, DecisionEnd, Snapshot
from kvtax_fleet.records.instances import Instance

# Tokens for which a piece counts at least, 16 bytes each: pieces take memory, and a
# client may write an id with any number of digits.
MIN_PIECE_TOKENS = PIECE_BYTES // 16


class PrefixIndex:
    """The instances that hold each key, as bit masks; an instance is its place, from 0.

    A key stands for a piece of a prompt and all that comes before it, so that one walk
    over a prompt's keys finds how deep each instance's cached prefix goes.
    """

    def __init__(self, instances: int) -> None:
        self._all = (1 << instances) - 1
        self._count = instances
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: int, instance: int) -> None:
        self._holders[key] = self._holders.get(key, 0) | 1 << instance

    def discard(self, key: int, instance: int) -> None:
        left = self._holders.get(key, 0) & ~(1 << instance)
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def depths(self, keys: Sequence[int]) -> list[int]:
        """Return how many of the leading keys each instance holds."""
        holders = self._holders
        depths = [0] * self._count
        left = self._all
        for depth, key in enumerate(keys):
            still = left & holders.get(key, 0)
            if still == left:
                continue
            _mark(depths, left & ~still, depth)
            left = still
            if not left:
                return depths
        _mark(depths, left, len(keys))
        return depths


def _mark(depths: list[int], instances: int, depth: int) -> None:
    while instances:
        lowest = instances & -instances
        depths[lowest.bit_length() - 1] = depth
        instances ^= lowest


class Mirror:
    """Estimate of what each instance has cached, at most `capacity_tokens`."""

    def __init__(self, instances: int, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._index = PrefixIndex(instances)
        # Tokens by piece, least recently used first.
        self._pieces = [OrderedDict[int, float]() for _ in range(instances)]
        self.tokens = [0.0] * instances

    def depths(self, keys: list[int]) -> list[int]:
        """Return how many leading pieces each instance should have."""
        return self._index.depths(keys)

    def add(self, instance: int, keys: list[int], piece_tokens: float) -> None:
        """Note that a prompt of these keys has been routed to an instance."""
        pieces = self._pieces[instance]
        # The last piece first: a prefix must outlive what builds on it.
        for key in reversed(keys):
            if key in pieces:
                pieces.move_to_end(key)
            else:
                pieces[key] = piece_tokens
                self.tokens[instance] += piece_tokens
                self._index.add(key, instance)
        while self.tokens[instance] > self._capacity:
            key, tokens = pieces.popitem(last=False)
            self.tokens[instance] -= tokens
            self._index.discard(key, instance)

    def clear(self, instance: int) -> None:
        for key in self._pieces[instance]:
            self._index.discard(key, instance)
        self._pieces[instance].clear()
        self.tokens[instance] = 0.0


class Route(msgspec.Struct, frozen=True):
    """A decision, and by name the tokens that each instance would have to compute."""

    decision: Decision
    prompt_tokens: int
    new_tokens: dict[str, int]


class Router:
    """The decisions about where requests go.

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
        pins: Pins,
        log: DecisionLog,
        now_ns: Callable[[], int],
    ) -> None:
        self._instances = instances
        self._place = {instance.name: place for place, instance in enumerate(instances)}
        self.difference_tokens = [0] * len(instances)
        self.differences = [0] * len(instances)
        self._decide = POLICIES[policy].decide
        self._parameters = parameters
        self._mirror = mirror
        self._loads = loads
        self._log = log
        self._now_ns = now_ns
        self._pins = pins
        self.decision_us: deque[float] = deque(maxlen=10_000)

    def route(
        self,
        end: DecisionEnd,
        body: RequestBody[Any],
        exact: dict[str, int] | None,
        attempt: int,
        without: Collection[str],
    ) -> Route:
        """Decide, log the decision and remember it. Raises NoInstance.

        `exact`: tokens of the prompt that each instance has cached; None where only the
        mirror estimates them. `without`: instances to leave out.
        """
        keys = body.keys()
        start_ns = self._now_ns()
        mirrored = self._mirrored(body, keys)
        cached = mirrored
        if exact is not None:
            cached = [exact.get(each.name, 0) for each in self._instances]
        request = RequestInfo(end.session, body.prompt_tokens)
        snapshot = self._snapshot(end.session, cached, without)
        decision = self._decide(request, snapshot, self._parameters)
        decision_us = (self._now_ns() - start_ns) / 1000
        self.decision_us.append(decision_us)
        place = self._place[decision.instance]
        if exact is not None:
            self.differences[place] += 1
            self.difference_tokens[place] += abs(mirrored[place] - cached[place])
        self._log.decided(
            end,
            decision,
            attempt=attempt,
            prompt_tokens=body.prompt_tokens,
            form=body.form,
            cache="mirror" if exact is None else "exact",
            snapshot=snapshot,
            decision_us=decision_us,
        )
        self._loads.decided(attempt == 0, decision.prefill is not None)
        self._remember(end.session, body, keys, decision)
        new = {
            candidate.name: max(0, request.prompt_tokens - candidate.cached_tokens)
            for candidate in snapshot.candidates
        }
        return Route(decision, request.prompt_tokens, new)

    def _mirrored(self, body: RequestBody[Any], keys: list[int]) -> list[int]:
        depths = self._mirror.depths(keys)
        tokens = {depth: body.tokens_in(depth) for depth in set(depths)}
        return [tokens[depth] for depth in depths]

    def _snapshot(
        self, session: str | None, cached: list[int], without: Collection[str]
    ) -> Snapshot:
        loads = self._loads
        candidates = []
        for place, instance in enumerate(self._instances):
            if instance.name in without:
                continue
            load = loads[instance.name]
            candidates.append(
                Candidate(
                    instance.name,
                    instance.role,
                    load.requests,
                    load.ongoing_tokens,
                    load.pending_prefill_tokens,
                    cached[place],
                    instance.kv_tokens,
                    load.waiting,
                    load.kv_used,
                )
            )
        if not candidates:
            raise NoInstance("no healthy instance")
        return Snapshot(
            candidates,
            self._pins.of(session),
            loads.arrivals,
            loads.offloads,
            loads.offloaded,
        )

    def _remember(
        self,
        session: str | None,
        body: RequestBody[Any],
        keys: list[int],
        decision: Decision,
    ) -> None:
        tokens = PIECE_BYTES * body.prompt_tokens / max(1, len(body.prompt))
        tokens = max(MIN_PIECE_TOKENS, tokens)
        names = {decision.instance, decision.prefill or decision.instance}
        for name in names:
            self._mirror.add(self._place[name], keys, tokens)
        self._pins.note(session, decision.instance)
