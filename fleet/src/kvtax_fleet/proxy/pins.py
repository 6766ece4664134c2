# SPDX-License-Identifier: Apache-2.0
"""The instance that serves each session."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_SESSIONS = 100_000


class Pin(NamedTuple):
    """The instance of a session, and its stay there.

    `turns`: requests since it came there. `at_tokens`: length of the first prompt.
    """

    instance: str
    turns: int
    at_tokens: int


class Pins:
    """The pins of the last MAX_SESSIONS sessions, for policies with affinity.

    A session is its hash, of 64 bits and salted: its name may be long.
    """

    def __init__(self) -> None:
        self._pins: OrderedDict[int, Pin] = OrderedDict()

    def of(self, session: str | None) -> Pin | None:
        """Return the session's pin, if there is one."""
        return None if session is None else self._pins.get(hash(session))

    def note(self, session: str | None, instance: str, prompt_tokens: int) -> None:
        """Note that a request of the session goes to an instance."""
        if session is None:
            return
        key = hash(session)
        pin = self._pins.get(key)
        if pin is None or pin.instance != instance:
            pin = Pin(instance, 0, prompt_tokens)
        self._pins[key] = pin._replace(turns=pin.turns + 1)
        self._pins.move_to_end(key)
        if len(self._pins) > MAX_SESSIONS:
            self._pins.popitem(last=False)
