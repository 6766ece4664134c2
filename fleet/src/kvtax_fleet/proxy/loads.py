# SPDX-License-Identifier: Apache-2.0
"""Requests and tokens in flight at each instance, counted up and down exactly once.

Leaving a `with` block counts down what entering it counted up, however it is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class InstanceLoad:
    """Load of one instance; fields as in kvtax_fleet.policies.Candidate."""

    requests: int = 0
    ongoing_tokens: int = 0
    pending_prefill_tokens: int = 0
    waiting: int | None = None
    kv_used: float | None = None


class FleetLoad:
    """The load of every instance, by name.

    `offloads`: under way. `arrivals`, `offloaded`: decisions so far, and those with a
    prefill elsewhere.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._loads = {name: InstanceLoad() for name in names}
        self.offloads = self.arrivals = self.offloaded = 0

    def __getitem__(self, name: str) -> InstanceLoad:
        return self._loads[name]

    def decided(self, is_first_attempt: bool, offloads: bool) -> None:
        """Count a decision, with a prefill elsewhere or without."""
        self.arrivals += is_first_attempt
        self.offloaded += offloads

    def flight(self, name: str, prompt_tokens: int) -> Flight:
        """Return a request at instance `name`, in flight inside the context."""
        return Flight(self._loads[name], prompt_tokens)

    @contextmanager
    def offload(self, name: str, prompt_tokens: int, new_tokens: int) -> Iterator[None]:
        """Count a prefill on instance `name` for the decode on another."""
        self.offloads += 1
        try:
            with self.flight(name, prompt_tokens) as flight:
                flight.prefills(new_tokens)
                yield
        finally:
            self.offloads -= 1


class Flight:
    """One request at one instance."""

    __slots__ = ("_load", "_pending", "_tokens")

    def __init__(self, load: InstanceLoad, prompt_tokens: int) -> None:
        self._load = load
        self._tokens = prompt_tokens
        self._pending = 0

    def __enter__(self) -> Flight:
        self._load.requests += 1
        self._load.ongoing_tokens += self._tokens
        return self

    def __exit__(self, *_: object) -> None:
        self.first_token()
        self._load.ongoing_tokens -= self._tokens
        self._load.requests -= 1

    def prefills(self, new_tokens: int) -> None:
        """Count `new_tokens` as pending prefill, from now to the first token."""
        self._load.pending_prefill_tokens += new_tokens
        self._pending += new_tokens

    def first_token(self) -> None:
        self._load.pending_prefill_tokens -= self._pending
        self._pending = 0

    def generated(self, tokens: int) -> None:
        self._load.ongoing_tokens += tokens
        self._tokens += tokens
