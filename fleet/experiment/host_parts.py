# SPDX-License-Identifier: Apache-2.0
"""The parts that hosts have of one fleet, as the host that asks for them sees them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleet.experiment.config import Arm
from fleet.experiment.part_tasks import (
    ANSWER,
    Answer,
    End,
    Failed,
    Go,
    Load,
    Replay,
    Seen,
    Start,
    Task,
    Watch,
)
from fleet.experiment.replayers import LEAD_NS, SHARES, Status, Work, worst
from fleet.launch.check import CheckError
from lab.hosts.clock import Clock, Reading, read_clock
from lab.hosts.cluster import Host
from lab.hosts.crew import Crew, Question
from lab.hosts.errors import HostLost
from lab.hosts.unpack import unpack
from lab.records.arm import FleetHost, HostClock
from lab.serving.errors import ServerError
from lab.serving.server import READY_DEADLINE_S

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WATCH_EVERY_S = 1.0
CLOCK_EVERY_S = 10.0
# A host answers at once, but while it makes a patched vLLM, or stops its servers and
# packs up their records.
ANSWER_S = 60.0
START_S = 300.0
END_S = 900.0


@dataclass
class HostPart:
    """What one host has of a fleet, and what it said last."""

    host: Host
    numbers: list[int]
    clock_port: int
    replays: bool = False
    seen: Seen = field(default_factory=Seen)
    readings: list[Reading] = field(default_factory=list)

    @property
    def clock(self) -> Clock:
        return Clock(self.readings)

    def record(self) -> FleetHost:
        """As arm.json has it, but for how busy it was."""
        clock = None
        if self.readings:
            clock = HostClock(
                ahead_us=self.clock.ahead_us,
                drift_us=self.clock.drift_us,
                residual_us=self.clock.residual_us,
                readings=len(self.readings),
            )
        instances = [f"i{number}" for number in self.numbers]
        return FleetHost(
            host=self.host.name, instances=instances, replays=self.replays, clock=clock
        )


class HostParts:
    """All parts of one fleet. Its methods raise HostLost, and ServerError where a part
    has failed."""

    def __init__(self, crew: Crew, parts: list[HostPart]) -> None:
        self.all = parts
        self._crew = crew
        self._watched_s = self._read_s = time.monotonic()

    def start(self, arm: Arm) -> None:
        """Until all instances answer. Raises CheckError, too."""
        self._each(lambda one: Start(arm, one.numbers, one.host.name), START_S)
        deadline_s = time.monotonic() + READY_DEADLINE_S
        self.read_clocks()
        while not all(one.seen.facts for one in self.all):
            if time.monotonic() > deadline_s:
                late = [one.host.name for one in self.all if not one.seen.facts]
                raise ServerError(
                    f"not ready after {READY_DEADLINE_S:.0f} s: {', '.join(late)}"
                )
            time.sleep(WATCH_EVERY_S / 2)
            self.watch()

    def check_alive(self) -> None:
        """To be called often: looks every second, and reads the clocks at times."""
        now_s = time.monotonic()
        if now_s - self._watched_s > WATCH_EVERY_S:
            self._watched_s = now_s
            self.watch()
        if now_s - self._read_s > CLOCK_EVERY_S:
            self._read_s = now_s
            with suppress(CheckError):
                self.read_clocks()

    def watch(self, memory: bool = False) -> None:
        for one, seen in self._each(lambda _: Watch(memory), ANSWER_S):
            one.seen = seen

    def read_clocks(self) -> None:
        """Raises CheckError."""
        for one in self.all:
            try:
                one.readings.append(read_clock(one.host.name, one.clock_port))
            except OSError as error:
                raise CheckError(f"the clock of {one.host.name}: {error}") from None

    @contextmanager
    def under_load(self) -> Iterator[None]:
        self.read_clocks()
        self._each(lambda _: Load(), ANSWER_S)
        yield
        self.watch(memory=True)
        self.read_clocks()

    @contextmanager
    def replaying(self, works: list[Work], trace: Path) -> Iterator[Status]:
        """Replayers on the hosts that are to have one; they begin at one moment."""
        hosts = [one for one in self.all if one.replays]
        for one, work in zip(hosts, works, strict=True):
            self._ask_one(one, Replay(work, trace.read_bytes()), START_S)
        waiting = True

        def status() -> int | None:
            nonlocal waiting
            if waiting and all(one.seen.replayer_ready for one in hosts):
                start_ns = time.perf_counter_ns() + LEAD_NS
                for one in hosts:
                    self._ask_one(one, Go(one.clock.there_ns(start_ns)), ANSWER_S)
                waiting = False
            return worst([one.seen.replayer_status for one in hosts])

        yield status

    def end(self, folder: Path, hosts: list[FleetHost]) -> list[Exception]:
        """Have all ended, and their files put into `folder`; what went wrong then.

        `hosts` is told how each was.
        """
        boot_id = BOOT_ID.read_text().strip()
        asked = [
            (one, self._ask(one, End(one.readings, boot_id)))
            for one in self.all
            if one.host.lost is None
        ]
        failures: list[Exception] = []
        for one, question in asked:
            record = one.record()
            try:
                (packed,) = self._crew.answers([question], END_S)
                ended = _take(packed, one.host.name, folder)
                record = msgspec.structs.replace(record, machine=ended.machine)
            except (HostLost, ServerError) as failure:
                failures.append(failure)
            hosts.append(record)
        return failures

    def _each(
        self, task: Callable[[HostPart], Task], within_s: float
    ) -> list[tuple[HostPart, Answer]]:
        """The answer of each part to its `task(part)`; all are asked at once."""
        questions = [self._ask(one, task(one)) for one in self.all]
        packed = self._crew.answers(questions, within_s)
        return [
            (one, answer_of(content, one.host))
            for one, content in zip(self.all, packed, strict=True)
        ]

    def _ask_one(self, part: HostPart, task: Task, within_s: float) -> Answer:
        (packed,) = self._crew.answers([self._ask(part, task)], within_s)
        return answer_of(packed, part.host)

    def _ask(self, part: HostPart, task: Task) -> Question:
        return self._crew.ask(part.host, msgspec.json.encode(task))


def answer_of(packed: bytes, host: Host) -> Answer:
    """Raises ServerError if it says that it has failed."""
    with tempfile.TemporaryDirectory(prefix="kvtax-answer-") as aside:
        return _read(unpack(packed, Path(aside)), host.name)


def _read(made: Path, host: str) -> Answer:
    answer = msgspec.json.decode((made / ANSWER).read_bytes(), type=Answer)
    if isinstance(answer, Failed):
        raise ServerError(f"{host}: {answer.error}")
    return answer


def _take(packed: bytes, host: str, folder: Path) -> Answer:
    """Put a part's files into the run's folder. Raises ServerError."""
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = unpack(packed, Path(aside))
        places = {
            "instances/*": folder / "instances",
            f"{SHARES}/*": folder / SHARES,
            "gpu*": folder / "hosts" / host,
        }
        for files, place in places.items():
            for one in made.glob(files):
                place.mkdir(parents=True, exist_ok=True)
                one.rename(place / one.name)
        return _read(made, host)
