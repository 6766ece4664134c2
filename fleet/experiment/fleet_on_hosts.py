# SPDX-License-Identifier: Apache-2.0
"""Fleets in real time over hosts of a Ray cluster: each host has a part of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm, Experiment
from fleet.experiment.fleets import Fleet
from fleet.experiment.part import PartFacts
from fleet.experiment.part_tasks import (
    ANSWER,
    EXPERIMENT,
    Answer,
    End,
    Failed,
    Fits,
    Hello,
    Load,
    Start,
    Task,
    Watch,
)
from fleet.experiment.placement import dealt, most_hosts
from fleet.launch.check import CheckError
from lab.hosts.clock import Clock, Reading, read_clock
from lab.hosts.cluster import NO_HOST_S, Host, hosts_of
from lab.hosts.crew import Crew
from lab.hosts.errors import HostLost, HostsError
from lab.hosts.unpack import unpack
from lab.records.arm import FleetHost, HostClock
from lab.records.instances import Instance
from lab.serving.errors import ServerError
from lab.serving.server import READY_DEADLINE_S

MODULE = "fleet.experiment.fleet_host"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WATCH_EVERY_S = 1.0
CLOCK_EVERY_S = 10.0
# It answers at once, but while it waits for an earlier run's servers to stop, makes a
# patched vLLM, or stops its servers and packs up their records.
ANSWER_S = 60.0
HELLO_S = 180.0
START_S = 300.0
END_S = 900.0


@contextmanager
def fleet_hosts(address: str, experiment: Experiment) -> Iterator[FleetHosts]:
    """The hosts of the cluster. Raises HostsError."""
    files = {EXPERIMENT: msgspec.json.encode(experiment)}
    with hosts_of(address, MODULE, files) as hosts:
        yield FleetHosts(experiment, Crew(hosts))


@dataclass
class _Part:
    """What one host has of a fleet."""

    host: Host
    numbers: list[int]
    clock_port: int
    facts: PartFacts | None = None
    peak_rss_mib: dict[str, float] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    def read_clock(self) -> None:
        """Raises OSError."""
        self.readings.append(read_clock(self.host.name, self.clock_port))


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
        parts = self._parts()
        hosts: list[FleetHost] = []
        try:
            self._start(parts, arm)
            yield self._fleet(parts, folder, hosts, time.monotonic() - began_s)
        except Exception:
            # Why it failed is known; of what is lost besides, nothing need be said.
            self._end(parts, folder, hosts)
            raise
        if failures := self._end(parts, folder, hosts):
            raise failures[0]

    def _members(self) -> list[Host]:
        """The hosts that can do a part."""
        for host in self._crew.members():
            if host in self._fits:
                continue
            with suppress(HostLost):
                (said,) = self._all([(host, Hello(host.name))], HELLO_S)
                self._fits[host] = said
        return [host for host in self._crew.members() if host in self._fits]

    def _parts(self) -> list[_Part]:
        """Instances go to this host last: it has the proxy and the replayer."""
        share = self._experiment.instances // self.count
        deadline_s = time.monotonic() + NO_HOST_S
        while True:
            members = [
                host for host in self._members() if self._fits[host].room >= share
            ]
            if len(members) >= self.count:
                break
            if time.monotonic() > deadline_s:
                raise HostsError(
                    f"a fleet is to be on {self.count} hosts, and for "
                    f"{NO_HOST_S:.0f} s only {len(members)} with room for its part "
                    "have been there: --resume goes on when there are more"
                )
            time.sleep(WATCH_EVERY_S)
        members.sort(key=lambda host: (host.name == self._crew.here, host.name))
        numbers = dealt(self._experiment.instances, self.count)
        return [
            _Part(host, own, self._fits[host].clock_port)
            for host, own in zip(members, numbers, strict=False)
        ]

    def _start(self, parts: list[_Part], arm: Arm) -> None:
        """Until all instances answer. Raises HostLost, ServerError, CheckError."""
        deadline_s = time.monotonic() + START_S + READY_DEADLINE_S
        tasks = [(one.host, Start(arm, one.numbers, one.host.name)) for one in parts]
        self._all(tasks, START_S)
        _read_clocks(parts)
        while not all(one.facts for one in parts):
            if time.monotonic() > deadline_s:
                raise ServerError(f"not ready after {START_S + READY_DEADLINE_S:.0f} s")
            time.sleep(WATCH_EVERY_S / 2)
            self._watch(parts)

    def _fleet(
        self, parts: list[_Part], folder: Path, hosts: list[FleetHost], ready_s: float
    ) -> Fleet:
        made = _in_order(chain.from_iterable(one.facts.instances for one in parts))
        recorded = [one.name for one in made if self._experiment.profile is not None]
        used_mib = [one.facts.gpu_used_mib for one in parts]
        return Fleet(
            instances=made,
            vocab_size=parts[0].facts.vocab_size,
            ready_s=ready_s,
            folders={name: folder / name for name in recorded},
            patches=parts[0].facts.patches,
            check_alive=_Alive(self, parts),
            peak_rss_mib=lambda: {
                name: mib for one in parts for name, mib in one.peak_rss_mib.items()
            },
            under_load=lambda: self._under_load(parts),
            hosts=hosts,
            survivors=[pid for one in parts for pid in one.facts.survivors],
            gpu_used_mib=None if None in used_mib else list(chain(*used_mib)),
        )

    @contextmanager
    def _under_load(self, parts: list[_Part]) -> Iterator[None]:
        _read_clocks(parts)
        self._all([(one.host, Load()) for one in parts], ANSWER_S)
        yield
        self._watch(parts)
        _read_clocks(parts)

    def _watch(self, parts: list[_Part]) -> None:
        """Raises HostLost, and ServerError if an instance has ended."""
        seen = self._all([(one.host, Watch()) for one in parts], ANSWER_S)
        for one, now in zip(parts, seen, strict=True):
            one.facts, one.peak_rss_mib = now.facts, now.peak_rss_mib

    def _end(
        self, parts: list[_Part], folder: Path, hosts: list[FleetHost]
    ) -> list[Exception]:
        """Have all ended, and their files put into `folder`; what went wrong then."""
        boot_id = BOOT_ID.read_text().strip()
        asked = [
            (one, self._ask(one.host, End(one.readings, boot_id)))
            for one in parts
            if one.host.lost is None
        ]
        failures: list[Exception] = []
        for one, question in asked:
            machine = None
            try:
                (packed,) = self._crew.answers([question], END_S)
                machine = _take(packed, one.host.name, folder).machine
            except (HostLost, ServerError) as failure:
                failures.append(failure)
            hosts.append(
                FleetHost(
                    host=one.host.name,
                    instances=[f"i{number}" for number in one.numbers],
                    machine=machine,
                    clock=_clock(one.readings),
                )
            )
        return failures

    def _all(self, tasks: list[tuple[Host, Task]], within_s: float) -> list[Answer]:
        """Have them done all at once. Raises HostLost, and ServerError of the first
        that failed."""
        questions = [self._ask(host, task) for host, task in tasks]
        answers = []
        for host, packed in zip(
            [host for host, _ in tasks],
            self._crew.answers(questions, within_s),
            strict=True,
        ):
            with tempfile.TemporaryDirectory(prefix="kvtax-answer-") as aside:
                answers.append(_answer(unpack(packed, Path(aside)), host.name))
        return answers

    def _ask(self, host: Host, task: Task) -> tuple[Host, int]:
        return self._crew.ask(host, msgspec.json.encode(task))


class _Alive:
    """Called often, it asks the hosts every second, and reads their clocks at times."""

    def __init__(self, hosts: FleetHosts, parts: list[_Part]) -> None:
        self._hosts, self._parts = hosts, parts
        self._watched_s = self._read_s = time.monotonic()

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s - self._watched_s > WATCH_EVERY_S:
            self._watched_s = now_s
            self._hosts._watch(self._parts)
        if now_s - self._read_s > CLOCK_EVERY_S:
            self._read_s = now_s
            for one in self._parts:
                with suppress(OSError):
                    one.read_clock()


def _read_clocks(parts: list[_Part]) -> None:
    """Raises CheckError."""
    for one in parts:
        try:
            one.read_clock()
        except OSError as error:
            raise CheckError(f"the clock of {one.host.name}: {error}") from None


def _clock(readings: list[Reading]) -> HostClock | None:
    if not readings:
        return None
    clock = Clock(readings)
    return HostClock(
        ahead_us=clock.ahead_us,
        drift_us=clock.drift_us,
        residual_us=clock.residual_us,
        readings=len(readings),
    )


def _answer(made: Path, host: str) -> Answer:
    """Raises ServerError."""
    answer = msgspec.json.decode((made / ANSWER).read_bytes(), type=Answer)
    if isinstance(answer, Failed):
        raise ServerError(f"{host}: {answer.error}")
    return answer


def _take(packed: bytes, host: str, folder: Path) -> Answer:
    """Put a part's files into the run's folder. Raises ServerError."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        made = unpack(packed, Path(aside))
        folder.mkdir(exist_ok=True)
        for one in (made / "instances").glob("*"):
            one.rename(folder / one.name)
        for one in made.glob("gpu*"):
            own = folder.parent / "hosts" / host
            own.mkdir(parents=True, exist_ok=True)
            one.rename(own / one.name)
        return _answer(made, host)


def _in_order(instances: Iterator[Instance]) -> list[Instance]:
    return sorted(instances, key=lambda one: int(one.name.removeprefix("i")))
