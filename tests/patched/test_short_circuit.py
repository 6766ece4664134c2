# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with the short-circuit against upstream's."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from mooncake_tables import BLOCKS, EDITS
from short_circuit_lab import (
    QUIET_STEPS,
    SHORT_CIRCUIT,
    Bench,
    asks_in_the_engine,
    asks_when_quiet,
    mutant,
    stuck_send_in_the_engine,
)
from variants import CONNECTOR, block_ids

PATCHES = ["mooncake_cpu_layout"]


@pytest.fixture(scope="module")
def bench(mooncake_engine, tmp_path_factory):
    return Bench(mooncake_engine, tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("release", ["installed", "later"])
def test_every_step_reports_what_upstream_reports(bench, release):
    """Told the same on one clock, in each role; expiry to the instant included."""
    run = bench.lockstep(release)
    assert run["problems"] == []
    assert run["counts"]["reports"] > 500
    assert run["counts"]["expiries"] > 50


@pytest.mark.parametrize("release", ["installed", "later"])
def test_loops_are_asked_only_if_they_have_something_to_report(bench, release):
    """Or if an entry expires while it is being sent."""
    assert bench.lockstep(release)["counts"]["asks_in_vain"] == 0


@pytest.mark.serial
@pytest.mark.parametrize("version", ["upstream", "patched"])
def test_free_running_threads_lose_double_and_delay_nothing(bench, version):
    """Known ids by the next step, stuck and failed sends within 1 s of the timeout."""
    check_stress(bench.stress("installed", version))


@pytest.mark.serial
def test_free_running_threads_of_the_later_release_lose_nothing_either(bench):
    check_stress(bench.stress("later", "patched"))


def check_stress(run: dict) -> None:
    assert run["problems"] == []
    assert min(run["counts"].values()) > 5
    assert len(run["counts"]) == 7


@pytest.mark.serial
def test_free_running_threads_report_the_ids_that_upstream_reports(bench):
    upstream, patched = (bench.stress("installed", v) for v in ("upstream", "patched"))
    assert patched["reported"] == upstream["reported"]


@pytest.mark.parametrize("release", ["installed", "later"])
def test_nothing_is_asked_of_the_loops_when_nothing_can_be_reported(bench, release):
    asks = asks_when_quiet(bench.party(release, "patched"))
    assert len(asks) == 7
    assert not any(asks.values())


def test_upstream_asks_both_loops_in_every_step(bench):
    asks = asks_when_quiet(bench.party("installed", "upstream"))
    assert set(asks.values()) == {2 * QUIET_STEPS}


def test_the_engines_steps_ask_no_loop_when_nothing_is_transferred(bench):
    """Without the patch each asks both."""
    assert asks_in_the_engine(bench, "upstream", steps=50) == 2 * 50
    assert asks_in_the_engine(bench, "patched", steps=50) == 0


def test_a_stuck_send_is_freed_in_time_and_transfers_still_end(bench):
    """In an engine that other requests keep stepping; the timeout is 1 s."""
    found = stuck_send_in_the_engine(bench)
    assert found["taken_s"] >= 1.0
    # Within a second of 2 ms each, however long the machine takes for one.
    assert found["steps_after_timeout"] <= 500
    assert found["problems"] == []
    assert found["pulled_tokens"] == 70


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block_is_needed(bench, name):
    assert bench.notices(mutant(name))


@pytest.mark.parametrize("name", EDITS)
def test_each_condition_is_needed(bench, name):
    assert bench.notices(mutant(name))


def test_no_block_of_the_patch_has_been_left_out_of_these_tests():
    package = Path(vllm.__file__).parent
    assert set(BLOCKS) == set(block_ids(SHORT_CIRCUIT, package, CONNECTOR))
