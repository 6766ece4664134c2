# SPDX-License-Identifier: Apache-2.0
"""Where each session is, and since when: what policies with affinity go by."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_SESSIONS = 100_000


class Pin(NamedTuple):
    """A session has sent `turns` requests to `instance` since it came there; the first
    had a prompt of `at_tokens`.
    """

    instance: str
    turns: int
    at_tokens: int


class Pins:
    """The sessions last seen, MAX_SESSIONS of them."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    def of(self, session: str | None) -> Pin | None:
        return None if session is None else self._pins.get(session)

    def note(self, session: str | None, instance: str, prompt_tokens: int) -> None:
        """A request of the session goes to an instance."""
        if session is None:
            return
        pin = self._pins.pop(session, None)
        if pin is None or pin.instance != instance:
            pin = Pin(instance, 0, prompt_tokens)
        self._pins[session] = pin._replace(turns=pin.turns + 1)
        if len(self._pins) > MAX_SESSIONS:
            self._pins.popitem(last=False)
