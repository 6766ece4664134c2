# SPDX-License-Identifier: Apache-2.0
"""Grade of the machine that a run was measured on: quiet, uneven or busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.records.per_config import Grade, MachineEntry, ServerConditions
from kvtax.records.requests import Phase
from kvtax.records.run import HostRecord
from kvtax.stats.distribution import Floats
from kvtax.verdict.holds import PLACE
from kvtax.verdict.trials import LoadedTrial

# With fewer holds a server's p90 and p10 are single holds.
MIN_HOLDS = 8


class Limit(NamedTuple):
    """The most of a number on a quiet machine, and on an uneven one."""

    quiet: float
    uneven: float
    reason: str

    def grade(self, number: float) -> Grade:
        if number <= self.quiet:
            return "quiet"
        return "uneven" if number <= self.uneven else "busy"


GRADES: tuple[Grade, ...] = ("busy", "uneven", "quiet")
# Between the medians of servers; the others are of one server each.
APART = Limit(0.10, 0.30, "equal work took {:.0%} longer on one server than on another")
LIMITS = {
    "yardstick_spread": Limit(
        1.3, 2.0, "equal work took {:.2f} times as long in some holds as in others"
    ),
    "steal_share": Limit(
        0.01, 0.05, "other machines had {:.1%} of the time of the cores"
    ),
    "others_cores": Limit(0.05, 0.30, "other processes took {:.2f} of a core"),
}


def grade(
    servers: Sequence[ServerConditions], apart: float | None
) -> tuple[Grade, list[str]]:
    """Return the worst grade of any number, and the numbers that are not quiet.

    `apart` is that of MachineEntry. A number that was not recorded is not quiet.
    """
    found: list[tuple[Grade, str]] = []
    if apart is not None:
        found.append((APART.grade(apart), APART.reason.format(apart)))
    elif len(servers) > 1:
        found.append(("uneven", "no yardstick was timed"))
    for name, limit in LIMITS.items():
        known = {server: getattr(server, name) for server in servers}
        numbers = {one: value for one, value in known.items() if value is not None}
        if len(numbers) < len(servers):
            missing = len(servers) - len(numbers)
            found.append(("uneven", f"{name} is not known of {missing} servers"))
        if not numbers:
            continue
        server = max(numbers, key=lambda server: numbers[server])
        beyond = sum(limit.grade(value) != "quiet" for value in numbers.values())
        where = f"{server.config} r{server.repeat}, the worst of {beyond} such servers"
        reason = f"{limit.reason.format(numbers[server])} ({where})"
        found.append((limit.grade(numbers[server]), reason))
    grades = [one for one, _ in found]
    worst: Grade = next(one for one in GRADES if one in (*grades, "quiet"))
    return worst, [reason for one, reason in found if one != "quiet"]


def machine_entry(
    trials: Iterable[LoadedTrial], hosts: Sequence[HostRecord] | None
) -> MachineEntry | None:
    """Grade the machines of a run; None if no trial has recorded any of it."""
    good = [trial for trial in trials if trial.steps is not None]
    servers = [conditions(trial) for trial in good]
    if all(one == ServerConditions(one.config, one.repeat) for one in servers):
        return None
    apart = _worst_apart(servers, hosts)
    worst, reasons = grade(servers, apart)
    medians = [one.yardstick_us for one in servers if one.yardstick_us is not None]
    cores = {t.facts.machine.cores for t in good if t.facts and t.facts.machine}
    return MachineEntry(
        grade=worst,
        reasons=reasons,
        cores=min(cores, default=None),
        yardstick_us=round(float(np.median(medians)), 3) if medians else None,
        yardstick_apart=apart,
        servers=servers,
    )


def conditions(trial: LoadedTrial) -> ServerConditions:
    """Summarise what the records of a trial tell of the machine."""
    load = trial.facts.machine if trial.facts else None
    holds = _of_holds(trial.steps) if trial.steps is not None else np.array([])
    spread = None
    if len(holds) >= MIN_HOLDS:
        low, high = np.quantile(holds, (0.1, 0.9))
        spread = round(float(high / low), 4)
    return ServerConditions(
        config=trial.config,
        repeat=trial.repeat,
        yardstick_us=round(float(np.median(holds)), 3) if len(holds) else None,
        yardstick_spread=spread,
        steal_share=load.steal_share if load else None,
        others_cores=load.others_cores if load else None,
    )


def _of_holds(steps: pl.DataFrame) -> Floats:
    """Compute the median of the yardstick in each hold."""
    timed = steps.filter(
        pl.col("phase") == Phase.HOLD, pl.col("yardstick_us").is_not_null()
    )
    holds = timed.group_by(PLACE).agg(pl.col("yardstick_us").median())
    return holds["yardstick_us"].to_numpy()


def _worst_apart(
    servers: Sequence[ServerConditions], hosts: Sequence[HostRecord] | None
) -> float | None:
    """Compute how far the medians of servers of one host are apart, at most."""
    here: list[Callable[[int], bool]] = [lambda repeat: True]
    if hosts:
        here = [host.repeats.__contains__ for host in hosts]
    found = []
    for is_here in here:
        own = [s.yardstick_us for s in servers if s.yardstick_us and is_here(s.repeat)]
        if len(own) > 1:
            found.append(max(own) / min(own) - 1)
    return round(max(found), 4) if found else None
