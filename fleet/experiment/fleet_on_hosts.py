# SPDX-License-Identifier: Apache-2.0
"""Fleets in real time over hosts of a Ray cluster: each host has a part of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm, Experiment
from fleet.experiment.fleets import Fleet
from fleet.experiment.host_parts import HostPart, HostParts, answer_of
from fleet.experiment.part_tasks import EXPERIMENT, Fits, Hello
from fleet.experiment.placement import dealt, most_hosts
from lab.hosts.cluster import NO_HOST_S, Host, hosts_of
from lab.hosts.crew import Crew
from lab.hosts.errors import HostLost, HostsError
from lab.hosts.progress import Progress
from lab.records.arm import FleetHost
from lab.serving.ports import LOOPBACK

MODULE = "fleet.experiment.fleet_host"
LOOK_EVERY_S = 1.0
# A host may wait for the servers of an earlier run to stop before it answers.
HELLO_S = 180.0


@contextmanager
def fleet_hosts(address: str, experiment: Experiment) -> Iterator[FleetHosts]:
    """The hosts of the cluster. Raises HostsError."""
    files = {EXPERIMENT: msgspec.json.encode(experiment)}
    with hosts_of(address, MODULE, files, Progress()) as hosts:
        yield FleetHosts(experiment, Crew(hosts))


class FleetHosts:
    """Makes fleets on `count` hosts each, which is to be set."""

    count: int

    def __init__(self, experiment: Experiment, crew: Crew) -> None:
        self._experiment = experiment
        self._crew = crew
        self._fits: dict[Host, Fits] = {}

    def most(self) -> int:
        """The largest count that there is room for now. Raises HostsError."""
        instances = self._experiment.instances
        rooms = {host.name: self._fits[host].room for host in self._members()}
        most = most_hosts(list(rooms.values()), instances)
        if most is None:
            each = ", ".join(f"{room} on {name}" for name, room in rooms.items())
            raise HostsError(
                f"{instances} instances, the same number on each host, have no room: "
                f"there is room for {each}"
            )
        return most

    @contextmanager
    def fleet(self, arm: Arm, folder: Path) -> Iterator[Fleet]:
        """As fleet.experiment.fleets.fresh_fleet, on the hosts.

        Raises HostLost, too, and HostsError if hosts are missing for a minute.
        """
        began_s = time.monotonic()
        parts = HostParts(self._crew, self._parts())
        hosts: list[FleetHost] = []
        try:
            parts.start(arm)
            yield self._fleet(parts, folder, hosts, time.monotonic() - began_s)
        except Exception:
            # Why it failed is known; of what is lost besides, nothing need be said.
            parts.end(folder, hosts)
            raise
        if failures := parts.end(folder, hosts):
            raise failures[0]

    def _members(self) -> list[Host]:
        """The hosts that can do a part. Raises HostsError."""
        members = self._crew.members()
        for host in members:
            if host not in self._fits:
                hello = msgspec.json.encode(Hello(host.name))
                with suppress(HostLost):
                    asked = self._crew.ask(host, hello)
                    (packed,) = self._crew.answers([asked], HELLO_S)
                    self._fits[host] = answer_of(packed, host)
        return [host for host in members if host in self._fits and host.lost is None]

    def _parts(self) -> list[HostPart]:
        """Who does what. Raises HostsError."""
        instances, replayers = self._experiment.instances, self._experiment.replayers
        share = instances // self.count
        deadline_s = time.monotonic() + NO_HOST_S
        while True:
            members = self._members()
            roomy = [host for host in members if self._fits[host].room >= share]
            if len(roomy) >= self.count and len(members) >= replayers:
                break
            if time.monotonic() > deadline_s:
                lost = self._crew.last_loss
                raise HostsError(
                    f"a fleet is to be on {self.count} hosts with room for {share} "
                    f"instances, and there are {len(roomy)}, in all {len(members)} for "
                    f"{replayers} replayers{f' ({lost})' if lost else ''}: --resume "
                    "goes on when there are more"
                )
            time.sleep(LOOK_EVERY_S)
        # This host comes last: it has the proxy.
        roomy.sort(key=lambda host: (host.name == self._crew.here, host.name))
        numbers = dict(zip(roomy, dealt(instances, self.count), strict=False))
        replay = self._replay(members, numbers)
        return [
            HostPart(
                host,
                numbers.get(host, []),
                self._fits[host].clock_port,
                replays=host in replay,
            )
            for host in members
            if host in numbers or host in replay
        ]

    def _replay(self, members: list[Host], busy: dict[Host, list[int]]) -> list[Host]:
        """Those that send requests: if they can, away from instances."""
        if self._experiment.replayers == 1:
            return []  # this one does, without being asked
        here = self._crew.here
        free_first = sorted(
            members, key=lambda host: (host in busy, host.name != here, host.name)
        )
        return free_first[: self._experiment.replayers]

    def _fleet(
        self, parts: HostParts, folder: Path, hosts: list[FleetHost], ready_s: float
    ) -> Fleet:
        facts = [one.seen.facts for one in parts.all if one.numbers]
        made = sorted(
            chain.from_iterable(one.instances for one in facts),
            key=lambda one: int(one.name.removeprefix("i")),
        )
        recorded = [one.name for one in made if self._experiment.profile is not None]
        used_mib = [one.gpu_used_mib for one in facts]
        return Fleet(
            instances=made,
            vocab_size=facts[0].vocab_size,
            ready_s=ready_s,
            folders={name: folder / "instances" / name for name in recorded},
            patches=facts[0].patches,
            check_alive=parts.check_alive,
            peak_rss_mib=lambda: {
                name: mib
                for one in parts.all
                for name, mib in one.seen.peak_rss_mib.items()
            },
            under_load=parts.under_load,
            hosts=hosts,
            survivors=[pid for one in parts.all for pid in one.seen.facts.survivors],
            gpu_used_mib=None if None in used_mib else list(chain(*used_mib)),
            address=self._address,
            replaying=parts.replaying,
        )

    @property
    def _address(self) -> str:
        """Where the proxy listens: to other hosts only if they send requests."""
        return LOOPBACK if self._experiment.replayers == 1 else self._crew.here
