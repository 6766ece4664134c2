# SPDX-License-Identifier: Apache-2.0
"""One clock for all instances: moments of several hosts, side by side.

Records are of CLOCK_MONOTONIC, which the processes of a host share and hosts do not.
Each file says which kernel's clock it is and what the wall clock showed when it began.
So another host's moments can be shifted, as exactly as the two wall clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from lab.records.warning import RunWarning
from look.found import Found


@dataclass(frozen=True)
class Clock:
    """`shift_ns` by instance, to be added to its moments; `zero_ns` is the first step.

    `unix_ns` is the wall clock at `zero_ns`, None where no file tells. `warnings` say
    how far the clocks can be trusted; there are none if they are one.
    """

    zero_ns: int
    shift_ns: dict[str, int]
    unix_ns: int | None
    warnings: tuple[RunWarning, ...] = ()

    def since_zero_ns(self, name: str, t_ns: int) -> int:
        """A moment of the instance `name`."""
        return t_ns + self.shift_ns[name] - self.zero_ns

    @property
    def utc(self) -> str:
        """When the first step began, in words."""
        if self.unix_ns is None:
            return "at an unknown time"
        moment = datetime.fromtimestamp(self.unix_ns / 1e9, UTC)
        return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def one_clock(instances: Sequence[Found]) -> Clock:
    """The clock of the first instance, for all of them; only those with steps count."""
    shown = [one for one in instances if one.first_ns is not None]
    if not shown:
        return Clock(0, {}, None)
    first = shown[0]
    shifts, unknown, others = {}, [], []
    for one in shown:
        shifts[one.name] = 0
        if one.header.boot_id == first.header.boot_id is not None:
            continue
        if one is not first and None not in (_ahead_ns(one), _ahead_ns(first)):
            shifts[one.name] = _ahead_ns(one) - _ahead_ns(first)
            others.append(one.name)
        elif one is not first:
            unknown.append(one.name)
    zero_ns = min(one.first_ns + shifts[one.name] for one in shown)
    ahead_ns = _ahead_ns(first)
    return Clock(
        zero_ns,
        shifts,
        None if ahead_ns is None else zero_ns + ahead_ns,
        _warnings(others, unknown),
    )


def _ahead_ns(instance: Found) -> int | None:
    """How far the wall clock is ahead of the instance's own."""
    header = instance.header
    if header.began_ns is None or header.began_unix_ns is None:
        return None
    return header.began_unix_ns - header.began_ns


def _warnings(others: list[str], unknown: list[str]) -> tuple[RunWarning, ...]:
    told = []
    if others:
        message = (
            f"{', '.join(others)} ran on other hosts: moments are aligned by the wall "
            "clocks, and are off by as much as these differ"
        )
        remedy = "Keep the hosts' clocks in step"
        told.append(RunWarning("other_hosts", message, remedy))
    if unknown:
        message = (
            f"{', '.join(unknown)} do not say which clock is theirs: their moments are "
            "taken as those of one host"
        )
        remedy = "Apply the patches of today; older ones did not record it"
        told.append(RunWarning("unknown_clock", message, remedy))
    return tuple(told)
