# SPDX-License-Identifier: Apache-2.0
"""Of a config that stays undecided, the report says how much more it would take."""

from __future__ import annotations

import pytest

from microbench.analysis.undecided import servers_needed


def slope(value: float, half: float) -> dict:
    return {"value": value, "ci95": [value - half, value + half]}


@pytest.mark.parametrize(
    ("found", "floor", "servers"),
    [
        # Flat needs a fourth of the width, growth above the margin a third.
        (slope(0.0, 8.0), 0.0, 32),
        (slope(8.0, 18.0), 0.0, 18),
        # Growth is told only above what two runs of the same thing differ by.
        (slope(8.0, 18.0), 5.0, 72),
        # Nothing is known of what servers differ by: one more tells.
        ({"value": 0.0, "ci95": None}, 0.0, 3),
        # At the margin, or where equal things differ by more, nothing ever tells.
        (slope(2.0, 3.0), 0.0, None),
        (slope(0.0, 3.0), 4.0, None),
    ],
)
def test_the_servers_needed_narrow_the_interval_to_the_room_there_is(
    found, floor, servers
):
    assert servers_needed(found, 2, floor, margin=2.0) == servers
