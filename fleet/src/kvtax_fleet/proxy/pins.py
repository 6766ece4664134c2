# SPDX-License-Identifier: Apache-2.0
"""The instance that serves each session."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 100_000


class Pins:
    """Instances of the last MAX_SESSIONS sessions, for policies with affinity.

    A session is its hash, of 64 bits and salted: its name may be long.
    """

    def __init__(self) -> None:
        self._instances: OrderedDict[int, str] = OrderedDict()

    def of(self, session: str | None) -> str | None:
        """Return the instance of the session's last request, if there is one."""
        return None if session is None else self._instances.get(hash(session))

    def note(self, session: str | None, instance: str) -> None:
        """Note that a request of the session goes to an instance."""
        if session is None:
            return
        key = hash(session)
        self._instances[key] = instance
        self._instances.move_to_end(key)
        if len(self._instances) > MAX_SESSIONS:
            self._instances.popitem(last=False)
