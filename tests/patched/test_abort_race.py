# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_abort_race and the short-circuit, on a real engine.

What each step reports is compared with upstream's in
tests/patches/test_mooncake_protocol.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from abort_lab import (
    PACKAGE,
    RACE,
    SHORT_CIRCUIT,
    Storm,
    code,
    goes_wrong,
    needs_block,
    needs_reports,
    run,
    storms,
)
from mooncake_tables import (
    FIXED_BY,
    NOTICES,
    REFUSED,
    RIGHT_UPSTREAM,
    SCENARIOS,
    WRONG_UPSTREAM,
)
from mooncake_world import World
from variants import CONNECTOR, STATS, load, patch, patched_source

PATCHES = ["mooncake_cpu_layout"]


def test_upstreams_engine_dies_of_an_abort_before_the_request_is_scheduled(
    mooncake_engine,
):
    needs_block("empty_pull")
    (death,) = run(mooncake_engine, code(), "aborted_before_scheduled")
    assert "_update_from_kv_xfer_finished" in death
    assert "assert req_id in self.requests" in death


def check_is_for_this_release(scenario: str) -> None:
    if scenario in FIXED_BY:
        needs_block(FIXED_BY[scenario])
    if scenario in REFUSED:
        needs_reports()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_request_ends_and_every_block_comes_back(mooncake_engine, scenario):
    if scenario != "aborted_before_scheduled":
        check_is_for_this_release(scenario)
    assert run(mooncake_engine, code(RACE), scenario) == []


@pytest.mark.parametrize("scenario", WRONG_UPSTREAM)
def test_the_scenario_goes_wrong_without_the_patch(mooncake_engine, scenario):
    check_is_for_this_release(scenario)
    assert goes_wrong(mooncake_engine, code(), scenario)


@pytest.mark.parametrize("scenario", RIGHT_UPSTREAM)
def test_what_upstream_does_right_is_right_without_the_patch(mooncake_engine, scenario):
    assert run(mooncake_engine, code(), scenario) == []


@pytest.mark.parametrize("block", NOTICES)
def test_each_block_of_the_patch_is_needed(mooncake_engine, block):
    needs_block(block)
    assert goes_wrong(mooncake_engine, code(RACE, without=block), NOTICES[block])


def test_no_block_of_the_patch_has_been_left_out_of_these_tests():
    blocks = {block.id for block in patch(RACE).blocks if block.file == CONNECTOR}
    protocol = {"forget", "same_id", "gone", "end_transfer", "name_failed"}
    assert blocks == set(NOTICES) | protocol | {"ended", "ended_in_failure"}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_engine_survives_a_storm_of_aborts_with_nothing_left_behind(
    mooncake_engine, policy
):
    """With both patches of the connector, as an operator runs it."""
    needs_reports()
    storm = storms(mooncake_engine, code(RACE, SHORT_CIRCUIT), policy)
    assert storm["problems"] == []
    other_end = {"recompute": "recomputed", "fail": "failed"}[policy]
    assert storm["counts"].keys() == {"aborted", "pulled", other_end}
    assert min(storm["counts"].values()) > 3


def test_the_storm_is_one_that_upstream_does_not_survive(mooncake_engine):
    assert goes_wrong(mooncake_engine, code(), Storm(0))


@pytest.mark.parametrize("patched", ["upstream", "patched"])
def test_a_request_that_failed_before_it_was_scheduled_counts_no_tokens(
    tmp_path, patched
):
    """Upstream counts a negative number of them, which ends the API server."""
    needs_block("never_scheduled", STATS)
    patches = [patch(RACE)] if patched == "patched" else []
    counts = load(patched_source(PACKAGE, STATS, patches, tmp_path)).PromptTokenStats()
    # One request that failed, and one that was computed.
    for cached, prompt_len in ((-1, 500), (32, 100)):
        counts.update_from_output(cached, 0, prompt_len)
    if patched == "upstream":
        assert counts.local_cache_hit == 31
    else:
        totals = (counts.computed, counts.local_cache_hit, counts.total)
        assert totals == (68, 32, 100)


STEPS = 50


@pytest.mark.parametrize("version", ["upstream", "patched"])
def test_upstreams_steps_ask_both_loops_and_patched_ones_none_if_nothing_is_sent(
    mooncake_engine, version
):
    """From 0.30 on the engine calls get_transfer_results, which calls get_finished."""
    World(mooncake_engine, code(SHORT_CIRCUIT) if version == "patched" else code())
    ids = mooncake_engine.decode_batch(4, STEPS)
    asked, ask = [], asyncio.run_coroutine_threadsafe

    def counted(coroutine, loop):
        asked.append(coroutine.__qualname__)
        return ask(coroutine, loop)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "run_coroutine_threadsafe", counted)
        mooncake_engine.time(STEPS)
    mooncake_engine.end_batch(ids)
    fetches = sum("fetch_finished" in name for name in asked)
    assert fetches == (2 * STEPS if version == "upstream" else 0)


def test_a_stuck_send_is_freed_in_time_and_transfers_still_end(mooncake_engine):
    """In an engine that other requests keep stepping; the timeout is 1 s."""
    world = World(mooncake_engine, code(SHORT_CIRCUIT), timeout_s=1)
    prefill = world.prefill("t")
    world.until(lambda: world.fates[prefill].complete)
    began_s, steps_s = time.monotonic(), []

    def freed() -> bool:
        steps_s.append(time.monotonic() - began_s)
        return not world.known([prefill])

    world.until(freed)
    world.prefill("u")
    decode = world.decode("u")
    assert world.settle() == []
    assert steps_s[-1] >= 1.0
    # Within a second of 2 ms each, however long the machine takes for one.
    assert sum(step_s > 1.0 for step_s in steps_s) <= 500
    assert world.fates[decode].pulled_tokens == 70
