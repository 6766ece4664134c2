# SPDX-License-Identifier: Apache-2.0
"""Which host has which instances: the same number on each, and none twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.experiment.placement import dealt, most_hosts

rooms = st.lists(st.integers(0, 5), max_size=6)
instances = st.integers(1, 12)


@given(rooms, instances)
def test_no_host_is_given_more_than_it_has_room_for_and_no_more_could_be_used(
    rooms: list[int], instances: int
) -> None:
    def works(hosts: int) -> bool:
        share, rest = divmod(instances, hosts)
        return rest == 0 and sum(room >= share for room in rooms) >= hosts

    found = most_hosts(rooms, instances)
    if found is not None:
        assert works(found)
    above = range((found or 0) + 1, len(rooms) + 1)
    assert not any(works(hosts) for hosts in above)


@given(st.integers(1, 6), st.integers(1, 4))
def test_each_instance_is_on_one_host_and_neighbours_are_on_different_ones(
    hosts: int, share: int
) -> None:
    found = dealt(hosts * share, hosts)
    assert [len(own) for own in found] == [share] * hosts
    host_of = {number: host for host, own in enumerate(found) for number in own}
    assert sorted(host_of) == list(range(hosts * share))
    if hosts > 1:
        assert all(host_of[one] != host_of[one - 1] for one in range(1, len(host_of)))
