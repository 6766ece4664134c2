# SPDX-License-Identifier: Apache-2.0
"""A fresh fleet for one run: parts on one host or several, started, watched, ended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from kvtax.engine.errors import ServerError
from kvtax.engine.server import READY_DEADLINE_S
from kvtax.hosts.errors import HostLost
from kvtax.proc.ports import LOOPBACK

from kvtax_fleet.experiment.config import Arm, Experiment
from kvtax_fleet.experiment.host_fleet import (
    FLEET_ERRORS,
    Answer,
    End,
    Ended,
    Go,
    HostFleet,
    Load,
    Replay,
    Seen,
    Start,
    Started,
    Task,
    Watch,
)
from kvtax_fleet.experiment.replayers import LEAD_NS, Status, Work, worst
from kvtax_fleet.launch.launched import CheckError, Workshop
from kvtax_fleet.records.arm import FleetHost, MachineLoad
from kvtax_fleet.records.instances import Instance

POLL_S = 0.2
CLOCK_EVERY_S = 10.0
# Deadlines of tasks. A host answers at once, except while it makes a patched vLLM, or
# stops its servers and packs their records.
ANSWER_S = 60.0
START_S = 300.0
END_S = 900.0

Pending = Callable[[], Answer]


class Part(ABC):
    """One host's part of a fleet, as the host of the command sees it.

    `ask` and its result raise FLEET_ERRORS, or HostLost.
    """

    watch_every_s = POLL_S

    def __init__(self, name: str, numbers: list[int], replays: bool) -> None:
        self.name = name
        self.numbers = numbers
        self.replays = replays
        self.started = Started()
        self.seen = Seen()
        self.watched_s = 0.0

    @abstractmethod
    def ask(self, task: Task, within_s: float) -> Pending:
        """Send a task; the result waits for its answer."""

    @abstractmethod
    def end(self, folder: Path) -> Callable[[], MachineLoad | None]:
        """Stop the part; the result waits, puts the files into the run's `folder`."""

    @abstractmethod
    def record(self, machine: MachineLoad | None) -> FleetHost | None:
        """Describe the part for arm.json; None for the only host of a fleet."""

    def start_ns(self, here_ns: int) -> int:
        """Convert a time of this host's clock to the part's."""
        return here_ns

    def read_clock(self) -> None:  # noqa: B027 (this host's clock needs no reading)
        """Compare the part's clock with this host's. Raises CheckError."""


class LocalPart(Part):
    """The part on this host, called directly."""

    def __init__(
        self, host_fleet: HostFleet, numbers: list[int], replays: bool
    ) -> None:
        super().__init__(LOOPBACK, numbers, replays)
        self._host_fleet = host_fleet

    def ask(self, task: Task, within_s: float) -> Pending:
        answer = self._host_fleet.do(task)
        return lambda: answer

    def end(self, folder: Path) -> Callable[[], MachineLoad | None]:
        answer = self._host_fleet.do(End())
        assert isinstance(answer, Ended)
        machine = answer.machine
        return lambda: machine

    def record(self, machine: MachineLoad | None) -> FleetHost | None:
        return None


def _merged(parts: list[tuple[Started, list[int]]]) -> Started:
    """Merge the facts of parts with the numbers of their instances.

    GPU memory is known only if it is on every host with instances.
    """
    survivors = [one.survivors for one, _ in parts if one.survivors is not None]
    used = [one.gpu_used_mib for one, numbers in parts if numbers]
    known = [mib for mib in used if mib is not None]
    return Started(
        max(one.vocab_size for one, _ in parts),
        next(one.patches for one, numbers in parts if numbers),
        list(chain(*survivors)) if survivors else None,
        list(chain(*known)) if len(known) == len(used) else None,
    )


class Fleet:
    """The instances that a run sends its requests to. Methods raise as Part.ask does.

    The last of `parts` is this host's. `started` has the facts of all of them. Once the
    fleet has ended, `machine` is the load of this host, and `hosts` describes the other
    parts.
    """

    def __init__(
        self, parts: Sequence[Part], folder: Path, records: bool, address: str
    ) -> None:
        self._parts = parts
        self._records = records
        self._folder = folder
        # The proxy listens here: on a network only if other hosts send requests.
        self.address = address
        self.hosts: list[FleetHost] = []
        self.machine: MachineLoad | None = None
        self.instances: list[Instance] = []
        self.started = Started()
        self._began_s = self._clocks_s = time.monotonic()

    def start(self, arm: Arm) -> None:
        """Begin to start all instances."""
        starts = [
            part.ask(Start(arm, part.numbers, part.name), START_S)
            for part in self._parts
        ]
        for part, pending in zip(self._parts, starts, strict=True):
            answer = pending()
            assert isinstance(answer, Started)
            part.started = answer
        self.started = _merged([(part.started, part.numbers) for part in self._parts])

    def wait_ready(self) -> float:
        """Wait until all instances answer; return the seconds since the beginning."""
        per_host = max(len(part.numbers) for part in self._parts)
        deadline_s = time.monotonic() + READY_DEADLINE_S * per_host
        self.read_clocks()
        while True:
            self.watch()
            late = [one.name for one in self._parts if one.seen.instances is None]
            if not late:
                break
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"instances do not answer {READY_DEADLINE_S * per_host:.0f} s "
                    f"after their start, on: {', '.join(late)}"
                )
            time.sleep(POLL_S)
        made = chain.from_iterable(one.seen.instances or () for one in self._parts)
        self.instances = list(made)
        if len(self._parts) > 1:
            self.instances.sort(key=lambda made: int(made.name.removeprefix("i")))
        return time.monotonic() - self._began_s

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of logs and records, by instance: complete after the end."""
        names = [each.name for each in self.instances if self._records]
        return {name: self._folder / "instances" / name for name in names}

    @property
    def peak_rss_mib(self) -> dict[str, float]:
        """Peak memory at the end of the load, by instance."""
        seen = [part.seen.peak_rss_mib for part in self._parts]
        return {name: mib for by_name in seen for name, mib in by_name.items()}

    def watch(self, memory: bool = False) -> None:
        """Update the state of all parts that were not looked at just now."""
        now_s = time.monotonic()
        due = [
            part
            for part in self._parts
            if memory or now_s - part.watched_s >= part.watch_every_s
        ]
        asked = [part.ask(Watch(memory), ANSWER_S) for part in due]
        for part, pending in zip(due, asked, strict=True):
            answer = pending()
            assert isinstance(answer, Seen)
            part.seen, part.watched_s = answer, now_s

    def read_clocks(self) -> None:
        """Compare all clocks. Raises CheckError."""
        self._clocks_s = time.monotonic()
        for part in self._parts:
            part.read_clock()

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Sample how busy the hosts are while requests are sent."""
        self.read_clocks()
        self._all(Load(begins=True))
        yield
        self.watch(memory=True)
        self._all(Load(begins=False))
        self.read_clocks()

    def replay(self, works: Sequence[Work], trace: Path) -> Status:
        """Start the replayers; several begin at one moment. Return their status."""
        senders = [part for part in self._parts if part.replays]
        for number, work in enumerate(works):
            part = senders[number % len(senders)]
            is_here = isinstance(part, LocalPart)
            part.ask(Replay(work, None if is_here else trace.read_bytes()), START_S)()
        waiting = len(works) > 1

        def status() -> int | None:
            nonlocal waiting
            self.watch()
            if time.monotonic() - self._clocks_s > CLOCK_EVERY_S:
                with suppress(CheckError):
                    self.read_clocks()
            if waiting and all(part.seen.replayers_ready for part in senders):
                start_ns = time.perf_counter_ns() + LEAD_NS
                for part in senders:
                    part.ask(Go(part.start_ns(start_ns)), ANSWER_S)()
                waiting = False
            return worst([part.seen.replayer_status for part in senders])

        return status

    def end(self) -> list[Exception]:
        """Stop all parts, collect their files; return what went wrong then."""
        failures: list[Exception] = []
        ending: list[tuple[Part, Callable[[], MachineLoad | None]]] = []
        for part in self._parts:
            try:
                ending.append((part, part.end(self._folder)))
            except (HostLost, *FLEET_ERRORS) as failure:
                failures.append(failure)
        for part, pending in ending:
            machine = None
            try:
                machine = pending()
            except (HostLost, *FLEET_ERRORS) as failure:
                failures.append(failure)
            record = part.record(machine)
            if record is None:
                self.machine = machine
            else:
                self.hosts.append(record)
        return failures

    def _all(self, task: Task) -> None:
        for pending in [part.ask(task, ANSWER_S) for part in self._parts]:
            pending()


@contextmanager
def ended(fleet: Fleet) -> Iterator[Fleet]:
    """End the fleet on leaving, however that happens; the first failure is raised."""
    try:
        yield fleet
    except Exception:
        fleet.end()
        raise
    if failures := fleet.end():
        raise failures[0]


@contextmanager
def local_part(
    experiment: Experiment,
    workshop: Workshop,
    trace: Path,
    folder: Path,
    numbers: list[int],
    replays: bool,
) -> Iterator[LocalPart]:
    """Make this host's part; stop it on leaving, by a signal as well."""
    host_fleet = HostFleet(experiment, workshop, trace, folder)
    try:
        yield LocalPart(host_fleet, numbers, replays)
    finally:
        host_fleet.stop()


@contextmanager
def fleet_here(
    experiment: Experiment, workshop: Workshop, trace: Path, folder: Path
) -> Iterator[Fleet]:
    """Make a fleet on this host alone, for the run with this folder."""
    numbers = list(range(experiment.instances))
    with local_part(experiment, workshop, trace, folder, numbers, True) as part:
        records = experiment.profile is not None
        with ended(Fleet([part], folder, records, LOOPBACK)) as fleet:
            yield fleet
