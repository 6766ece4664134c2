# SPDX-License-Identifier: Apache-2.0
"""What is in flight at each instance, counted up and down exactly once.

Leaving a `with` block counts down what entering it counted up, however it is left. Each
worker counts in a row of its own, so that none waits for another, and what is read is
the sum of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

# A row: an InstanceLoad for each instance, and these.
_OFFLOADS, _ARRIVALS, _OFFLOADED = -3, -2, -1


class InstanceLoad(NamedTuple):
    """What is in flight at one instance; fields as in fleet.policies.Candidate."""

    requests: int
    ongoing_tokens: int
    pending_prefill_tokens: int


_FIELDS = len(InstanceLoad._fields)
_REQUESTS, _ONGOING, _PENDING = range(_FIELDS)
Row = list[int] | memoryview


class Totals(NamedTuple):
    """All loads at one moment; fields as in fleet.policies.Snapshot."""

    instances: list[InstanceLoad]
    offloads: int
    arrivals: int
    offloaded: int


def row_words(instances: int) -> int:
    """How many int64 a worker's row has."""
    return _FIELDS * instances + 3


class FleetLoad:
    """The load of every instance, by name, and what else decisions count.

    `rows`: a row for each worker (int64, C order), of which this one writes row `own`;
    None for a worker that is alone.
    """

    def __init__(
        self, names: Iterable[str], rows: np.ndarray | None = None, own: int = 0
    ) -> None:
        self._at = {name: _FIELDS * place for place, name in enumerate(names)}
        # Of a memoryview, too, the items are Python's integers, each written at once.
        alone = [[0] * row_words(len(self._at))]
        self._rows: list[Row] = (
            alone if rows is None else [memoryview(row) for row in rows]
        )
        self._own = self._rows[own]

    def totals(self) -> Totals:
        words = list(self._rows[0])
        for row in self._rows[1:]:
            words = [one + other for one, other in zip(words, row, strict=True)]
        *of_instances, offloads, arrivals, offloaded = words
        fields = (of_instances[one::_FIELDS] for one in range(_FIELDS))
        return Totals(list(map(InstanceLoad, *fields)), offloads, arrivals, offloaded)

    def __getitem__(self, name: str) -> InstanceLoad:
        return self.totals().instances[self._at[name] // _FIELDS]

    @property
    def offloads(self) -> int:
        """Offloads under way."""
        return self.totals().offloads

    def decided(self, is_first_attempt: bool, offloads: bool) -> None:
        """Somebody's instance has been chosen, with a prefill elsewhere or without."""
        self._own[_ARRIVALS] += is_first_attempt
        self._own[_OFFLOADED] += offloads

    def flight(self, name: str, prompt_tokens: int) -> Flight:
        """One request at instance `name`, in flight inside the context."""
        return Flight(self._own, self._at[name], prompt_tokens)

    @contextmanager
    def offload(self, name: str, prompt_tokens: int, new_tokens: int) -> Iterator[None]:
        """A prefill on instance `name` for the decode on another one."""
        self._own[_OFFLOADS] += 1
        try:
            with self.flight(name, prompt_tokens) as flight:
                flight.prefills(new_tokens)
                yield
        finally:
            self._own[_OFFLOADS] -= 1


class Flight:
    """One request at one instance, whose load begins in `words` at `at`."""

    __slots__ = ("_at", "_pending", "_tokens", "_words")

    def __init__(self, words: Row, at: int, prompt_tokens: int) -> None:
        self._words = words
        self._at = at
        self._tokens = prompt_tokens
        self._pending = 0

    def __enter__(self) -> Flight:
        self._words[self._at + _REQUESTS] += 1
        self._words[self._at + _ONGOING] += self._tokens
        return self

    def __exit__(self, *_: object) -> None:
        self.first_token()
        self._words[self._at + _ONGOING] -= self._tokens
        self._words[self._at + _REQUESTS] -= 1

    def prefills(self, new_tokens: int) -> None:
        """`new_tokens` of the prompt are computed here, from now to the first token."""
        self._words[self._at + _PENDING] += new_tokens
        self._pending += new_tokens

    def first_token(self) -> None:
        self._words[self._at + _PENDING] -= self._pending
        self._pending = 0

    def generated(self, tokens: int) -> None:
        self._words[self._at + _ONGOING] += tokens
        self._tokens += tokens
