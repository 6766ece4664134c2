# SPDX-License-Identifier: Apache-2.0
"""What servers differ by is pooled over a run, and a decision stands."""

from __future__ import annotations

import numpy as np
import pytest

from lab.stats.processes import Repeats
from microbench.analysis.measured import Pool


def servers(*values: float) -> dict[str, Repeats]:
    return {"schedule": Repeats(np.array(values), np.full(len(values), 0.01), 10.0)}


FIRST_LOOK = {
    "decided": servers(1.0, 1.2),
    "other": servers(3.0, 3.3),
    "undecided": servers(0.0, 0.4),
}


def interval(found, name: str) -> tuple[float, float]:
    return Pool((), looks=3).estimates(found)[name]["schedule"].ci95


@pytest.mark.parametrize("later", [0.2, 9.0])
def test_a_config_keeps_the_interval_that_it_was_decided_by(later):
    """What others measure later, quiet or disturbed, does not make it doubtful."""
    second_look = FIRST_LOOK | {"undecided": servers(0.0, 0.4, later)}
    assert interval(second_look, "decided") == interval(FIRST_LOOK, "decided")
    assert interval(second_look, "undecided") != interval(FIRST_LOOK, "undecided")


def test_a_config_that_lost_a_server_has_an_interval_from_the_others():
    low, high = interval(FIRST_LOOK | {"lost": servers(2.0)}, "lost")
    assert low < 2.0 < high
