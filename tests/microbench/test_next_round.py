# SPDX-License-Identifier: Apache-2.0
"""A sweep goes on with what is undecided, and ends within its time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from synthetic import Truth, write_run

from lab.records.trial import TrialRecord
from microbench.profile import Profile, load_profile
from microbench.rounds import configs_of_next_round, undecided

pytestmark = pytest.mark.slow

WALL_S = 60.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A walk that grows, a config that never does, and one with half of its servers."""
    truths = [
        Truth("walk", slope=40.0),
        Truth("plain"),
        Truth("unsure", slope=2.0, repeat_offsets=(0.0, 60.0)),
    ]
    return write_run(tmp_path_factory.mktemp("run"), truths, repeats=3)


def trials(repeats: int = 3) -> list[TrialRecord]:
    return [
        TrialRecord(
            config=name,
            repeat=repeat,
            status="ok",
            num_blocks=1,
            block_size=16,
            wall_s=WALL_S,
        )
        for name in ("walk", "plain", "unsure")
        for repeat in range(repeats)
    ]


def profile(**changes: float) -> Profile:
    wanted = {"repeats": 3, "most_repeats": 5, "minutes": 60.0} | changes
    return msgspec.structs.replace(load_profile("cpu"), **wanted)


def test_what_is_undecided_is_measured_again_and_nothing_else(run_dir):
    assert configs_of_next_round(run_dir, profile(), trials()) == ["unsure"]


def test_no_config_is_measured_on_more_servers_than_the_profile_allows(run_dir):
    assert configs_of_next_round(run_dir, profile(most_repeats=3), trials()) == []


def test_a_sweep_ends_within_its_time(run_dir):
    # Nine trials of a minute each.
    assert configs_of_next_round(run_dir, profile(minutes=9.5), trials()) == []
    assert configs_of_next_round(run_dir, profile(minutes=10.0), trials()) == ["unsure"]


def test_a_config_that_lost_servers_is_measured_again(run_dir):
    # They were set aside, or failed: fewer count than the profile asks for.
    asked = profile(repeats=4)
    found = configs_of_next_round(run_dir, asked, trials())
    assert set(found) == {"walk", "plain", "unsure"}


def test_what_needs_least_to_be_decided_comes_first(tmp_path):
    truths = [
        Truth("wide", slope=2.0, repeat_offsets=(0.0, 60.0)),
        Truth("plain"),
        Truth("narrow", slope=2.0, repeat_offsets=(0.0, 15.0)),
    ]
    folder = write_run(tmp_path, truths, repeats=2)
    found = undecided(folder, repeats=2)
    assert found.index("narrow") < found.index("wide")
