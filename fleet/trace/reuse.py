# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a trace were seen before, if nothing is ever forgotten."""

from __future__ import annotations

import numpy as np

from fleet.trace.prefixes import OwnerTable, mix


class Reuse:
    """Counts blocks seen before with all that precede them.

    `intra_session` are those that an earlier turn of the same session had,
    `cross_session` those that only other sessions had; together they are what a cache
    that forgets nothing hits. Memory: 16 to 32 bytes per distinct prefix, 12 to 24 per
    request.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.intra_session = 0
        self.cross_session = 0
        self._firsts = OwnerTable()  # the session that had a prefix first
        self._others = OwnerTable()  # (prefix, session) where that is another one
        # By session, its last prompt: how many blocks, and the key of all of them.
        self._last_lengths = np.zeros(1 << 16, np.int32)
        self._last_keys = np.zeros(1 << 16, np.uint64)

    @property
    def distinct(self) -> int:
        """Different prefixes: the cache that forgets nothing has as many blocks."""
        return self._firsts.size

    def add(self, keys: np.ndarray, lengths: np.ndarray, sessions: np.ndarray) -> None:
        """Count prompts: keys of their prefixes, how many each has, their sessions."""
        known = self._as_before(keys, lengths, sessions)
        starts = np.cumsum(lengths) - lengths
        new = np.arange(len(keys)) >= np.repeat(starts + known, lengths)
        keys, owners = keys[new], np.repeat(sessions, lengths - known)

        firsts = self._firsts.claim(keys, owners)
        own = firsts == owners
        cross = (firsts >= 0) & ~own
        pairs = mix(keys[cross] ^ mix(owners[cross].astype(np.uint64)))
        again = self._others.claim(pairs, owners[cross]) >= 0
        self.blocks += int(lengths.sum())
        self.intra_session += int(known.sum() + own.sum() + again.sum())
        self.cross_session += int(len(pairs) - again.sum())

    def _as_before(
        self, keys: np.ndarray, lengths: np.ndarray, sessions: np.ndarray
    ) -> np.ndarray:
        """How many leading blocks are the whole prompt of the turn before, or 0.

        Most blocks of agentic sessions are, and need no look into the tables.
        """
        if not len(keys):
            return np.zeros_like(lengths)
        while sessions.max() >= len(self._last_lengths):
            self._last_lengths = np.append(self._last_lengths, 0 * self._last_lengths)
            self._last_keys = np.append(self._last_keys, 0 * self._last_keys)
        ends = np.cumsum(lengths)
        # A prompt without blocks has no key; the one taken here is never looked at.
        whole = keys[np.maximum(ends, 1) - 1]
        last_lengths = self._last_lengths[sessions]
        last_keys = self._last_keys[sessions]
        order = np.argsort(sessions, kind="stable")
        before, after = order[:-1], order[1:]
        same = sessions[before] == sessions[after]
        last_lengths[after[same]] = lengths[before[same]]
        last_keys[after[same]] = whole[before[same]]
        # Of several turns of a session numpy keeps the last written.
        self._last_lengths[sessions], self._last_keys[sessions] = lengths, whole

        grown = (last_lengths > 0) & (last_lengths <= lengths)
        places = np.where(grown, ends - lengths + last_lengths, 1) - 1
        return np.where(grown & (keys[places] == last_keys), last_lengths, 0)
