# SPDX-License-Identifier: Apache-2.0
"""Turns of made-up sessions as columns, and the requests that they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fleet.trace.request import Request

DECODE_TOKENS_PER_S = 50.0
CHUNK = 1 << 14


class Turns(NamedTuple):
    """One turn at each place; every column has the same length."""

    session: np.ndarray
    turn: np.ndarray
    arrival_s: np.ndarray
    think_s: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    blocks: np.ndarray
    kept: np.ndarray  # blocks taken over from the turn before
    shares_system: np.ndarray  # whether its session begins with the system prompt
    last: np.ndarray  # of its session

    def at(self, places: np.ndarray) -> Turns:
        """The turns at these places: numbers, or a mask."""
        return Turns(*(column[places] for column in self))


class Contexts:
    """Gives blocks their ids. Memory: the prompts of the sessions under way."""

    def __init__(self, system_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._system = list(range(system_blocks))
        self._next_id = system_blocks
        self._last: dict[int, list[int]] = {}  # each session's last prompt

    def requests(self, turns: Turns) -> Iterator[Request]:
        """The requests that some turns are, in order of arrival."""
        order = np.argsort(turns.arrival_s, kind="stable")
        for begin in range(0, len(order), CHUNK):
            chunk = turns.at(order[begin : begin + CHUNK])
            for values in zip(*(column.tolist() for column in chunk), strict=True):
                yield self._request(*values)

    def _request(
        self,
        session: int,
        turn: int,
        arrival_s: float,
        think_s: float,
        input_tokens: int,
        output_tokens: int,
        blocks: int,
        kept: int,
        shares_system: bool,
        last: bool,
    ) -> Request:
        if turn == 0:
            hashes = self._system[:blocks] if shares_system else []
        else:
            hashes = self._last.pop(session)[:kept]
        new = blocks - len(hashes)
        hashes.extend(range(self._next_id, self._next_id + new))
        self._next_id += new
        if not last:
            self._last[session] = hashes
        return Request(
            arrival_s=arrival_s,
            session=f"s{session}",
            turn=turn,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            hashes=hashes,
            block_tokens=self._block_tokens,
            think_s=think_s if turn else None,
        )


def log_normal(rng: np.random.Generator, mean: float, n: int) -> np.ndarray:
    """With a standard deviation of 1 in the logarithm: 37 % above the mean."""
    return rng.lognormal(np.log(mean) - 0.5, 1.0, n)


def firsts(session: np.ndarray) -> np.ndarray:
    """Where each session's first turn is."""
    return np.flatnonzero(np.diff(session, prepend=-1))


def lasts(session: np.ndarray) -> np.ndarray:
    """Whether each turn is the last one of its session."""
    return np.diff(session, append=-1) != 0


def sum_within(session: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Running sums that begin anew with each session."""
    first = firsts(session)
    sums = np.cumsum(values)
    before = sums[first] - values[first]
    return sums - np.repeat(before, np.diff(np.append(first, len(session))))


def turn_numbers(session: np.ndarray) -> np.ndarray:
    """0, 1, ... within each session."""
    return sum_within(session, np.ones(len(session), np.int64)) - 1


def arrivals_s(
    session: np.ndarray,
    begins_s: np.ndarray,
    output_tokens: np.ndarray,
    think_s: np.ndarray,
) -> np.ndarray:
    """When each turn is sent: think time after the answer before has been decoded.

    `begins_s` has a time for each session.
    """
    waited_s = think_s.copy()
    waited_s[1:] += output_tokens[:-1] / DECODE_TOKENS_PER_S
    waited_s[firsts(session)] = begins_s
    return np.round(sum_within(session, waited_s), 3)
