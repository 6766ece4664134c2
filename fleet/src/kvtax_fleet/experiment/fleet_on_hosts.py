# SPDX-License-Identifier: Apache-2.0
"""Fleets in real time over hosts of a Ray cluster: each host has a part of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from kvtax.engine.errors import ServerError
from kvtax.hosts.clock import Clock, Reading, read_clock
from kvtax.hosts.cluster import NO_HOST_S, Host, hosts_of
from kvtax.hosts.errors import HostLost, HostsError
from kvtax.hosts.group import Group
from kvtax.hosts.progress import Progress
from kvtax.hosts.results import unpack
from kvtax.proc.ports import LOOPBACK

from kvtax_fleet.experiment.config import Experiment
from kvtax_fleet.experiment.fleet import END_S, Fleet, Part, Pending, ended, local_part
from kvtax_fleet.experiment.fleet_worker import (
    ANSWER,
    EXPERIMENT,
    Failed,
    Hello,
    HostAnswer,
    Room,
)
from kvtax_fleet.experiment.host_fleet import Answer, End, Ended, Task
from kvtax_fleet.experiment.replayers import SHARES
from kvtax_fleet.launch.launched import CheckError, Workshop
from kvtax_fleet.records.arm import FleetHost, HostClock, MachineLoad

MODULE = "kvtax_fleet.experiment.fleet_worker"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOK_EVERY_S = 1.0
# Deadline of a host's first answer: it may wait for servers of an earlier run to stop.
HELLO_S = 180.0


class RemotePart(Part):
    """The part on a host of the cluster. A host that failed raises ServerError."""

    watch_every_s = 1.0

    def __init__(
        self,
        group: Group,
        host: Host,
        numbers: list[int],
        clock_port: int,
        replays: bool,
    ) -> None:
        super().__init__(host.name, numbers, replays)
        self._group = group
        self._host = host
        self._clock_port = clock_port
        self._readings: list[Reading] = []

    def ask(self, task: Task, within_s: float) -> Pending:
        packed = self._group.send(self._host, msgspec.json.encode(task), within_s)

        def wait() -> Answer:
            answer = _read_answer(packed(), self.name)
            assert not isinstance(answer, Room | Failed)
            return answer

        return wait

    def end(self, folder: Path) -> Callable[[], MachineLoad | None]:
        boot_id = BOOT_ID.read_text().strip()
        task = msgspec.json.encode(End(self._readings, boot_id))
        packed = self._group.send(self._host, task, END_S)

        def wait() -> MachineLoad | None:
            answer = _read_answer(packed(), self.name, folder)
            assert isinstance(answer, Ended)
            return answer.machine

        return wait

    def record(self, machine: MachineLoad | None) -> FleetHost:
        clock = None
        if self._readings:
            compared = Clock(self._readings)
            clock = HostClock(
                ahead_us=compared.ahead_us,
                drift_us=compared.drift_us,
                residual_us=compared.residual_us,
                readings=len(self._readings),
            )
        return FleetHost(
            host=self.name,
            instances=[f"i{number}" for number in self.numbers],
            replays=self.replays,
            clock=clock,
            machine=machine,
        )

    def start_ns(self, here_ns: int) -> int:
        return Clock(self._readings).there_ns(here_ns)

    def read_clock(self) -> None:
        try:
            self._readings.append(read_clock(self.name, self._clock_port))
        except OSError as error:
            raise CheckError(f"the clock of {self.name}: {error}") from None


@contextmanager
def fleet_hosts(
    address: str, experiment: Experiment, trace: Path
) -> Iterator[FleetHosts]:
    """Connect to the hosts of the cluster at `address`. Raises HostsError."""
    files = {EXPERIMENT: msgspec.json.encode(experiment)}
    with hosts_of(address, MODULE, files, Progress()) as hosts:
        yield FleetHosts(experiment, trace, Group(hosts))


class FleetHosts:
    """Makes fleets on `count` hosts each, which must be set first."""

    count: int

    def __init__(self, experiment: Experiment, trace: Path, group: Group) -> None:
        self._experiment = experiment
        self._trace = trace
        self._group = group
        self._rooms: dict[Host, Room] = {}

    def most(self) -> int:
        """Compute the largest count that there is room for now. Raises HostsError."""
        instances = self._experiment.instances
        rooms = {host.name: self._rooms[host].instances for host in self._members()}
        most = most_hosts(list(rooms.values()), instances)
        if most is None:
            each = ", ".join(f"{room} on {name}" for name, room in rooms.items())
            raise HostsError(
                f"{instances} instances, the same number on each host, have no room: "
                f"there is room for {each}"
            )
        return most

    @contextmanager
    def fleet(self, folder: Path) -> Iterator[Fleet]:
        """Make a fleet on the hosts, for the run with this folder.

        Raises HostLost, and HostsError if hosts are missing for a minute.
        """
        experiment = self._experiment
        # A single replayer is here: its times need no conversion.
        replays_here = experiment.replayers == 1
        address = LOOPBACK if replays_here else self._group.here
        workshop = Workshop(folder / "workshop")
        records = experiment.profile is not None
        with local_part(
            experiment, workshop, self._trace, folder, [], replays_here
        ) as here:
            parts = [*self._parts(), here]
            with ended(Fleet(parts, folder, records, address)) as fleet:
                yield fleet

    def _members(self) -> list[Host]:
        """List the hosts that can have a part. Raises HostsError."""
        members = self._group.members()
        for host in members:
            if host not in self._rooms:
                hello = msgspec.json.encode(Hello(host.name))
                with suppress(HostLost):
                    packed = self._group.send(host, hello, HELLO_S)
                    room = _read_answer(packed(), host.name)
                    assert isinstance(room, Room)
                    self._rooms[host] = room
        return [host for host in members if host in self._rooms and host.lost is None]

    def _parts(self) -> list[RemotePart]:
        """Choose the hosts, their instances and replayers. Raises HostsError."""
        instances, replayers = self._experiment.instances, self._experiment.replayers
        share = instances // self.count
        deadline_s = time.monotonic() + NO_HOST_S
        while True:
            members = self._members()
            roomy = [host for host in members if self._rooms[host].instances >= share]
            if len(roomy) >= self.count and len(members) >= replayers:
                break
            if time.monotonic() > deadline_s:
                lost = self._group.last_loss
                raise HostsError(
                    f"a fleet needs {self.count} hosts with room for {share} instances "
                    f"each, and there are {len(roomy)}; {len(members)} hosts in all "
                    f"for {replayers} replayers{f' ({lost})' if lost else ''}: "
                    "--resume goes on when there are more"
                )
            time.sleep(LOOK_EVERY_S)
        # This host comes last: it has the proxy.
        roomy.sort(key=lambda host: (host.name == self._group.here, host.name))
        numbers = dict(zip(roomy, deal(instances, self.count), strict=False))
        senders = self._senders(members, numbers)
        return [
            RemotePart(
                self._group,
                host,
                numbers.get(host, []),
                self._rooms[host].clock_port,
                replays=host in senders,
            )
            for host in members
            if host in numbers or host in senders
        ]

    def _senders(self, members: list[Host], busy: dict[Host, list[int]]) -> list[Host]:
        """Choose the hosts that send requests: if possible, hosts without instances."""
        if self._experiment.replayers == 1:
            return []  # this process does
        here = self._group.here
        free_first = sorted(
            members, key=lambda host: (host in busy, host.name != here, host.name)
        )
        return free_first[: self._experiment.replayers]


def most_hosts(rooms: Sequence[int], instances: int) -> int | None:
    """Compute the most hosts that can have the same number of instances each.

    `rooms` is how many instances each host has room for. None if there is not enough
    room on any number of hosts.
    """
    for hosts in range(min(len(rooms), instances), 0, -1):
        share, rest = divmod(instances, hosts)
        if rest == 0 and sum(room >= share for room in rooms) >= hosts:
            return hosts
    return None


def deal(instances: int, hosts: int) -> list[list[int]]:
    """Deal the numbers of the instances: one host after the other gets the next."""
    return [list(range(first, instances, hosts)) for first in range(hosts)]


def _read_answer(packed: bytes, host: str, folder: Path | None = None) -> HostAnswer:
    """Read an answer; move a part's files that go with it into the run's `folder`.

    Raises ServerError if the host reports a failure.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-answer-", dir=folder) as aside:
        made = unpack(packed, Path(aside), f"the answer of {host}")
        if folder is not None:
            _move_files(made, host, folder)
        content = (made / ANSWER).read_bytes()
    answer: HostAnswer = msgspec.json.decode(content, type=HostAnswer)
    if isinstance(answer, Failed):
        raise ServerError(f"{host}: {answer.error}")
    return answer


def _move_files(made: Path, host: str, folder: Path) -> None:
    places = {
        "instances/*": folder / "instances",
        f"{SHARES}/*": folder / SHARES,
        "gpu*": folder / "hosts" / host,
    }
    for files, place in places.items():
        for path in made.glob(files):
            place.mkdir(parents=True, exist_ok=True)
            path.rename(place / path.name)
