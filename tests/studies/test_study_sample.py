# SPDX-License-Identifier: Apache-2.0
"""The twin of the reference study's sample has the study's figures."""

from __future__ import annotations

import pytest
from kvtax_fleet.paths import FLEET
from kvtax_fleet.policies.decision import HEAVY_ABOVE_TOKENS, HUGE_ABOVE_TOKENS
from kvtax_fleet.trace import read_trace

from studies.reference_study.population import sampled_requests
from studies.reference_study.sample import FIRST, figures, new_tokens


def test_the_committed_trace_is_the_sample():
    trace = FLEET / "traces" / "study_sample.jsonl.xz"
    assert list(read_trace(trace)) == sampled_requests()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 0, 1])
def test_every_figure_is_within_its_tolerance(seed):
    """Of other seeds the first 200 are another draw of the same population."""
    found = figures(sampled_requests(seed))
    held = [figure for figure in found if figure.tolerance is not None]
    assert len(held) == len(found) - 1
    off = {
        (figure.population, figure.name): figure.here
        for figure in held
        if abs(figure.here - figure.study) > figure.tolerance
        and (seed == 42 or figure.population != FIRST)
    }
    assert off == {}


@pytest.mark.parametrize("seed", [42, 0, 1])
def test_each_fifth_has_the_same_classes_but_for_chance_and_growth(seed):
    new = new_tokens(sampled_requests(seed))
    for first in range(0, 1_000, 200):
        part = new[first : first + 200]
        huge = sum(tokens > HUGE_ABOVE_TOKENS for tokens in part) / 200
        heavy = sum(tokens > HEAVY_ABOVE_TOKENS for tokens in part) / 200
        assert 0.1 < huge < 0.22
        assert 0.35 < heavy < 0.55
