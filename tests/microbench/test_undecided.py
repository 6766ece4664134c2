# SPDX-License-Identifier: Apache-2.0
"""Of a config that stays undecided, the report says how much more it would take."""

from __future__ import annotations

import math

import pytest

from microbench.analysis.undecided import servers_needed


def known(value: float, half: float) -> dict:
    return {"value": value, "ci95": [value - half, value + half]}


@pytest.mark.parametrize(
    ("slope", "fall", "floor", "servers"),
    [
        # Flat needs a fourth of the width, growth above the margin a third.
        (known(0.0, 1.0), known(0.0, 8.0), 0.0, 33),
        (known(8.0, 18.0), known(8.0, 18.0), 0.0, 19),
        # Growth is told only above what two runs of the same thing differ by.
        (known(8.0, 12.0), known(8.0, 12.0), 5.0, 33),
        # The fall is certain, and the slope does not agree with it: that must be known
        # to grow, too.
        (known(20.0, 50.0), known(60.0, 20.0), 0.0, 16),
        (known(-3.0, 50.0), known(60.0, 20.0), 0.0, math.inf),
        # Growth that stays after the reset is a drift, and half of it must be excluded.
        (known(9.0, 17.0), known(0.0, 8.0), 0.0, 12),
        # Nothing is known of what servers differ by, or there was no reset: one more.
        ({"value": 0.0, "ci95": None}, known(0.0, 1.0), 0.0, 3),
        (known(0.0, 1.0), None, 0.0, 3),
        # At the margin, or where equal things differ by more, nothing ever tells.
        (known(2.0, 1.0), known(2.0, 3.0), 0.0, math.inf),
        (known(0.0, 1.0), known(0.0, 3.0), 4.0, math.inf),
    ],
)
def test_the_servers_needed_narrow_the_interval_to_the_room_there_is(
    slope, fall, floor, servers
):
    assert servers_needed(slope, fall, 2, (floor, floor), margin=2.0) == servers
