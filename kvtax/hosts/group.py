# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster that work together: each does tasks of its own part."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import cast

import ray

from kvtax.hosts.cluster import SILENT_S, Host, Hosts
from kvtax.hosts.errors import HostLost

# An agent that has not answered by then will be given up.
SETTLE_S = SILENT_S + 30.0


class Group:
    """Sends tasks to single ones of `hosts`; `here` is the address of this host."""

    def __init__(self, hosts: Hosts) -> None:
        own = ray.get_runtime_context().get_node_id()
        (self.here,) = (
            node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own
        )
        self._hosts = hosts
        self._numbers = itertools.count()
        self._answers: dict[int, bytes] = {}

    @property
    def last_loss(self) -> str:
        """The host that was given up last, and why; empty if none was."""
        return self._hosts.last_loss

    def members(self) -> list[Host]:
        """Return the present hosts; new ones may appear after a while.

        Raises HostsError if there has been none for a minute.
        """
        deadline_s = time.monotonic() + SETTLE_S
        self._look()
        while not self._hosts.settled() and time.monotonic() < deadline_s:
            self._look()
        return self._hosts.ready()

    def send(self, host: Host, task: bytes, within_s: float) -> Callable[[], bytes]:
        """Send a task; the result waits for its answer, a tar file.

        Both raise HostLost. A host that does not answer in time is given up.
        """
        _require(host)
        number = next(self._numbers)
        host.begin(number, task)

        def answer() -> bytes:
            deadline_s = time.monotonic() + within_s
            while True:
                self._look()
                _require(host)
                if number in self._answers:
                    return self._answers.pop(number)
                if time.monotonic() > deadline_s:
                    self._hosts.give_up(host, f"no answer for {within_s:.0f} s")

        return answer

    def _look(self) -> None:
        self._hosts.look()
        for _, number, content in self._hosts.results():
            # Without a place for it, a result comes here.
            self._answers[number] = cast(bytes, content)
        self._hosts.take_lost()


def _require(host: Host) -> None:
    """Raise HostLost if the host is used no more."""
    if host.lost is not None:
        raise HostLost(host.lost)
