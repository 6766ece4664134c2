# SPDX-License-Identifier: Apache-2.0
"""Hosts of a Ray cluster that work together: each is asked for its own part."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

import ray

from lab.hosts.cluster import SILENT_S, Host, Hosts
from lab.hosts.errors import HostLost

# An agent that has not answered by then will be given up.
SETTLE_S = SILENT_S + 30.0

Question = tuple[Host, int]


class Crew:
    """Asks the processes on `hosts`; `here` is the address of this one."""

    def __init__(self, hosts: Hosts) -> None:
        own = ray.get_runtime_context().get_node_id()
        (self.here,) = (
            node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own
        )
        self._hosts = hosts
        self._numbers = itertools.count()
        self._came: dict[int, bytes] = {}

    @property
    def last_loss(self) -> str:
        """The host that was given up last, and why; empty if none was."""
        return self._hosts.last_loss

    def members(self) -> list[Host]:
        """The hosts that are there now; those that have just come may take a while.

        Raises HostsError if there has been none for a minute.
        """
        deadline = time.monotonic() + SETTLE_S
        self._hear()
        while not self._hosts.settled() and time.monotonic() < deadline:
            self._hear()
        return self._hosts.ready()

    def ask(self, host: Host, task: bytes) -> Question:
        number = next(self._numbers)
        host.begin(number, task)
        return host, number

    def answers(self, questions: Sequence[Question], within_s: float) -> list[bytes]:
        """What was made of them, as tar files. Raises HostLost."""
        deadline = time.monotonic() + within_s
        while True:
            self._hear()
            require(host for host, _ in questions)
            silent = [host for host, number in questions if number not in self._came]
            if not silent:
                return [self._came.pop(number) for _, number in questions]
            if time.monotonic() > deadline:
                self._hosts.give_up(silent[0], f"no answer for {within_s:.0f} s")

    def _hear(self) -> None:
        self._hosts.look()
        for _, number, content in self._hosts.results():
            self._came[number] = content
        self._hosts.take_lost()


def require(hosts: Iterable[Host]) -> None:
    """Raises HostLost if one of them is used no more."""
    for host in hosts:
        if host.lost is not None:
            raise HostLost(host.lost)
