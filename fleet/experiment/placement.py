# SPDX-License-Identifier: Apache-2.0
"""Which instances of a fleet are on which host: the same number on each."""

from __future__ import annotations

from collections.abc import Sequence


def most_hosts(rooms: Sequence[int], instances: int) -> int | None:
    """On how many hosts at most, where hosts have room for so many instances each.

    None if there is not enough room on any number of them.
    """
    for hosts in range(min(len(rooms), instances), 0, -1):
        share, rest = divmod(instances, hosts)
        if rest == 0 and sum(room >= share for room in rooms) >= hosts:
            return hosts
    return None


def dealt(instances: int, hosts: int) -> list[list[int]]:
    """The numbers of the instances on each host: one host after the other."""
    return [list(range(first, instances, hosts)) for first in range(hosts)]
