# SPDX-License-Identifier: Apache-2.0
"""A trace session by session: turns, tokens, growth."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np


class SessionRow(msgspec.Struct):
    """One session of the table."""

    session: str
    turns: int
    input_tokens: int  # of all its prompts
    output_tokens: int
    first_input_tokens: int  # the first turn's prompt
    longest_input_tokens: int
    growth_tokens: int  # from the first turn's prompt to the last one's


class PerSession(NamedTuple):
    """All sessions, in order of their first requests; arrays are int64."""

    turns: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    first_input_tokens: np.ndarray
    longest_input_tokens: np.ndarray
    growth_tokens: np.ndarray

    @classmethod
    def of(
        cls, sessions: np.ndarray, inputs: np.ndarray, outputs: np.ndarray
    ) -> PerSession:
        """From the session, input and output tokens of each request, as they came."""
        order = np.argsort(sessions, kind="stable")
        begins = np.flatnonzero(np.diff(sessions[order], prepend=-1))
        turns = np.diff(begins, append=len(order))
        inputs, outputs = inputs[order].astype(np.int64), outputs[order]
        firsts, lasts = inputs[begins], inputs[begins + turns - 1]
        return cls(
            turns=turns,
            input_tokens=np.add.reduceat(inputs, begins),
            output_tokens=np.add.reduceat(outputs, begins, dtype=np.int64),
            first_input_tokens=firsts,
            longest_input_tokens=np.maximum.reduceat(inputs, begins),
            growth_tokens=lasts - firsts,
        )

    def largest(self, count: int, names: list[str]) -> list[SessionRow]:
        """Those with the most input tokens, the largest first."""
        order = np.argsort(-self.input_tokens, kind="stable")[:count]
        columns = zip(*(column[order].tolist() for column in self), strict=True)
        return [
            SessionRow(names[at], *values)
            for at, values in zip(order.tolist(), columns, strict=True)
        ]
