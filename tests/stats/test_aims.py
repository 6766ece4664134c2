# SPDX-License-Identifier: Apache-2.0
"""An interval meets an aim, misses it, or leaves the question open."""

from __future__ import annotations

import msgspec
import pytest

from kvtax.stats import Estimate
from kvtax.stats.aims import Aim, aims_table, judge


@pytest.mark.parametrize(
    ("ci95", "at_most", "at_least"),
    [
        ((1.0, 2.9), "met", "missed"),
        ((1.0, 3.0), "met", "undecided"),
        ((2.9, 3.1), "undecided", "undecided"),
        ((3.0, 5.0), "undecided", "met"),
        ((3.1, 5.0), "missed", "met"),
    ],
)
def test_an_aim_is_judged_by_the_whole_interval(ci95, at_most, at_least):
    found = Estimate(3.0, ci95)
    assert judge(found, Aim(what="a step", at_most=3.0)) == at_most
    assert judge(found, Aim(what="a step", at_least=3.0)) == at_least


def test_nothing_is_met_where_the_interval_is_not_known():
    unknown = Estimate(1.0, (float("nan"), float("nan")))
    assert judge(unknown, Aim(what="a step", at_most=3.0)) == "undecided"


@pytest.mark.parametrize("bounds", [{}, {"at_most": 1.0, "at_least": 0.5}])
def test_an_aim_has_exactly_one_bound(bounds):
    with pytest.raises(ValueError, match="either at_most or at_least"):
        Aim(what="a step", **bounds)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"what": "a step"} | bounds, Aim)


def test_an_aim_says_what_it_asks_for_and_who_asks():
    hooks = Aim(what="hooks", at_most=3.0, unit="us")
    assert str(hooks) == "hooks: at most 3 us (ours)"
    throughput = Aim(what="throughput", at_least=0.9, whose="a paper's")
    assert str(throughput) == "throughput: at least 0.9 (a paper's)"
    row = aims_table([(hooks, Estimate(4.0, (3.5, 4.5)))], ".1f").splitlines()[-1]
    assert row == "| hooks | at most 3 us | ours | 4.0 [3.5, 4.5] | missed |"


def test_an_interval_is_the_same_after_it_has_been_in_a_file():
    found = Estimate(1.25, (-1.0, 2.0))
    encoded = msgspec.json.encode(found)
    assert encoded == b'{"value":1.25,"ci95":[-1.0,2.0]}'
    assert msgspec.json.decode(encoded, type=Estimate) == found
    assert f"{found:+.1f}" == "+1.2 [-1.0, +2.0]"
