# SPDX-License-Identifier: Apache-2.0
"""Has one host's part of a fleet, as the host where the command was given asks for it.

lab.hosts.agent starts it, as python -m fleet.experiment.fleet_host FOLDER.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from fleet.experiment.config import Experiment
from fleet.experiment.fleets import FLEET_ERRORS, instance_settings
from fleet.experiment.our_clock import convert
from fleet.experiment.part import Part
from fleet.experiment.part_tasks import (
    ANSWER,
    EXPERIMENT,
    Answer,
    Done,
    End,
    Ended,
    Failed,
    Fits,
    Go,
    Hello,
    Load,
    Replay,
    Seen,
    Start,
    Task,
    Watch,
)
from fleet.launch.launched import Workshop
from lab.config import ConfigError
from lab.hosts.asked import REFUSED, Asked
from lab.hosts.clock import Clock, ClockServer, Reading
from lab.hosts.fit import Unfit, as_without_ray
from lab.serving import preflight
from lab.serving.machine_lock import MachineBusy, machine_lock
from lab.serving.supervise import exit_on_signals

WATCH_EVERY_S = 1.0
UNFIT = (Unfit, ConfigError, MachineBusy, *preflight.CONFIG_ERRORS)


def main() -> int:
    folder = Path(sys.argv[1])
    exit_on_signals()
    experiment = msgspec.json.decode(
        (folder / EXPERIMENT).read_bytes(), type=Experiment
    )
    asked = Asked(folder)
    with ExitStack() as stack:
        try:
            as_without_ray()
            if experiment.profile is not None:
                stack.enter_context(machine_lock())
                preflight.check_machine(instance_settings(experiment))
        except UNFIT as error:
            print(error, file=sys.stderr)
            return REFUSED
        workshop = stack.enter_context(Workshop(folder / "workshop"))
        part = Part(experiment, workshop, folder / "part")
        stack.callback(part.stop)
        while asked.open:
            for number, content in asked.come(WATCH_EVERY_S):
                task = msgspec.json.decode(content, type=Task)
                made = folder / "answers" / str(number)
                made.mkdir(parents=True)
                try:
                    answer = _answer(task, part, made)
                except (ConfigError, *FLEET_ERRORS) as error:
                    answer = Failed(str(error))
                (made / ANSWER).write_bytes(msgspec.json.encode(answer))
                asked.done(number, made)
    return 0


def _answer(task: Task, part: Part, made: Path) -> Answer:
    match task:
        case Hello(host):
            return Fits(part.room(), ClockServer(host).port)
        case Start(arm, numbers, host):
            part.start(arm, numbers, host)
        case Watch(memory):
            facts, replayer = part.ready(), part.replayer
            peak_rss_mib = part.peak_rss_mib() if memory else {}
            if replayer is None:
                return Seen(facts, peak_rss_mib)
            return Seen(facts, peak_rss_mib, replayer.gate.ready, replayer.status())
        case Load():
            part.begin_load()
        case Replay(work, trace):
            part.replay(work, trace)
        case Go(start_ns):
            part.replayer.gate.open(start_ns)
        case End(readings, boot_id):
            part.stop()
            if readings:
                clock = Clock([Reading(*one) for one in readings])
                convert(part.folder, clock, boot_id)
            try:
                return Ended(part.machine())
            finally:
                # Logs are wanted also where the records are not what they should be.
                for one in part.folder.glob("*"):
                    one.rename(made / one.name)
    return Done()


if __name__ == "__main__":
    sys.exit(main())
