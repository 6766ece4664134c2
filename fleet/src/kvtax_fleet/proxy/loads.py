# SPDX-License-Identifier: Apache-2.0
"""Requests and tokens in flight at each instance, counted up and down exactly once.

Leaving a `with` block counts down what entering it counted up, however it is left. Each
worker counts in a row of its own, so that no worker waits for another; readers sum all
rows. The rows of several workers are in shared memory that survives each of them. It
has no locks: a killed worker leaves none held.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .session_affinity import SharedPins

# A row: an InstanceLoad for each instance, and these.
_OFFLOADS, _ARRIVALS, _OFFLOADED = -3, -2, -1


class InstanceLoad(NamedTuple):
    """Load of one instance; fields as in kvtax_fleet.policies.Candidate."""

    requests: int
    ongoing_tokens: int
    pending_prefill_tokens: int


_FIELDS = len(InstanceLoad._fields)
_REQUESTS, _ONGOING, _PENDING = range(_FIELDS)
Row: TypeAlias = "list[int] | memoryview[int]"
Integers = npt.NDArray[np.int64]


class Totals(NamedTuple):
    """All loads at one moment; fields as in kvtax_fleet.policies.Snapshot."""

    instances: list[InstanceLoad]
    offloads: int
    arrivals: int
    offloaded: int


def row_words(instances: int) -> int:
    """Return the number of int64 in a worker's row."""
    return _FIELDS * instances + 3


class FleetLoad:
    """The load of every instance, by name, and the counts of decisions.

    `rows`: a row for each worker (C order), of which this worker writes row `own`; None
    for a worker that is alone.
    """

    def __init__(
        self, names: Iterable[str], rows: Integers | None = None, own: int = 0
    ) -> None:
        self._at = {name: _FIELDS * place for place, name in enumerate(names)}
        # Items of a memoryview are Python's integers, too, each written at once.
        self._rows: list[Row] = []
        if rows is None:
            self._rows.append([0] * row_words(len(self._at)))
        else:
            self._rows.extend(memoryview(row) for row in rows)
        self._own = self._rows[own]

    def totals(self) -> Totals:
        words = list(self._rows[0])
        for row in self._rows[1:]:
            words = [mine + other for mine, other in zip(words, row, strict=True)]
        *of_instances, offloads, arrivals, offloaded = words
        fields = (of_instances[field::_FIELDS] for field in range(_FIELDS))
        return Totals(list(map(InstanceLoad, *fields)), offloads, arrivals, offloaded)

    def __getitem__(self, name: str) -> InstanceLoad:
        return self.totals().instances[self._at[name] // _FIELDS]

    @property
    def offloads(self) -> int:
        """Offloads under way."""
        return self.totals().offloads

    def decided(self, is_first_attempt: bool, offloads: bool) -> None:
        """Count a decision, with a prefill elsewhere or without."""
        self._own[_ARRIVALS] += is_first_attempt
        self._own[_OFFLOADED] += offloads

    def flight(self, name: str, prompt_tokens: int) -> Flight:
        """Return a request at instance `name`, in flight inside the context."""
        return Flight(self._own, self._at[name], prompt_tokens)

    @contextmanager
    def offload(self, name: str, prompt_tokens: int, new_tokens: int) -> Iterator[None]:
        """Count a prefill on instance `name` for the decode on another."""
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
        """Count `new_tokens` as pending prefill, from now to the first token."""
        self._words[self._at + _PENDING] += new_tokens
        self._pending += new_tokens

    def first_token(self) -> None:
        self._words[self._at + _PENDING] -= self._pending
        self._pending = 0

    def generated(self, tokens: int) -> None:
        self._words[self._at + _ONGOING] += tokens
        self._tokens += tokens


class Shared:
    """State of several workers in shared memory, made before they are forked.

    `loads`: rows of a FleetLoad. `ports`: where each worker answers the others, 0 for a
    worker that does not. `authorization`: the header by which it knows them.
    """

    def __init__(self, workers: int, names: Sequence[str]) -> None:
        words = row_words(len(names))
        self.loads = _shared_integers(workers * words).reshape(workers, words)
        self.ports = _shared_integers(workers)
        self.authorization = f"Bearer {secrets.token_hex()}"
        self.pins = SharedPins(names)

    def clear(self, place: int) -> None:
        """Remove the load of the dead worker at `place`."""
        self.loads[place] = 0
        self.ports[place] = 0


class Seat(NamedTuple):
    """A worker's place among the others, and its number, which is never used again."""

    shared: Shared
    place: int
    number: int


def _shared_integers(count: int) -> Integers:
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
