# SPDX-License-Identifier: Apache-2.0
"""Aborts and failures of Mooncake transfers with the real scheduler and connector."""

from __future__ import annotations

import pytest
from vllm_process import ScriptProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(installed_vllm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("abort_race") / "engine"
    patches = ["mooncake_cpu_layout"]
    with ScriptProcess(
        folder, "abort_race_script.py", patches, recording=False
    ) as process:
        return process.result()


def test_upstream_engine_dies_of_an_abort_before_the_request_is_scheduled(found):
    (death,) = found["wrong_upstream"]["aborted_before_scheduled"]
    assert "_update_from_kv_xfer_finished" in death
    assert "assert req_id in self.requests" in death


def test_every_request_ends_and_every_block_comes_back_with_the_race_patch(found):
    assert len(found["race"]) == 15
    assert [problems for problems in found["race"].values() if problems] == []


def test_the_scenarios_go_wrong_without_the_race_patch(found):
    """Apart from those that upstream does right, which the patch must not spoil."""
    assert len(found["wrong_upstream"]) == 12
    assert [name for name, wrong in found["wrong_upstream"].items() if not wrong] == []
    assert not any(found["right_upstream"].values())


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_engine_survives_a_storm_of_aborts_with_nothing_left_behind(found, policy):
    """With both patches of the connector, as an operator runs it."""
    storm = found["storm"][policy]
    assert storm["problems"] == []
    other_end = {"recompute": "recomputed", "fail": "failed"}[policy]
    assert storm["counts"].keys() == {"aborted", "pulled", other_end}
    assert min(storm["counts"].values()) > 3


def test_the_storm_is_one_that_upstream_does_not_survive(found):
    assert found["storm_upstream"]


def test_each_block_of_the_race_patch_is_needed(found):
    unnoticed = [
        name for name, problems in found["race_without"].items() if not problems
    ]
    assert len(found["race_without"]) == 21
    assert unnoticed == []


def test_metrics_count_nothing_of_a_request_that_failed_before_it_was_scheduled(found):
    """Upstream counts a negative number of tokens, which ends the API server."""
    assert found["counted"]["upstream"]["local_cache_hit"] == 31
    counts = found["counted"]["race"]
    assert (counts["computed"], counts["local_cache_hit"], counts["total"]) == (
        68,
        32,
        100,
    )


def test_defence_alone_keeps_the_engine_alive(found):
    assert found["defence"] == []


def test_defence_drops_and_logs_what_nobody_waits_for_and_nothing_else(found):
    assert found["defence_reports"] == {
        "logged": ["no one", "nobody", "running", "waiting"],
        "freed": True,
        "received": True,
        "kept": True,
    }


def test_each_block_of_the_defence_is_needed(found):
    assert all(found["defence_without"].values())
    assert len(found["defence_without"]) == 2
