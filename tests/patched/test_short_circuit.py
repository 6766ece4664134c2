# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with the short-circuit against upstream's."""

from __future__ import annotations

import pytest
from vllm_process import ScriptProcess

from lab.paths import REPOSITORY

pytestmark = pytest.mark.slow

# The first release supported that has get_transfer_results.
LATER = REPOSITORY / "third_party" / "vllm-0.33.0" / "vllm"
RUNS = ("lockstep", "later_lockstep")
STRESS = ("stress", "stress_upstream", "later_stress")


@pytest.fixture(scope="module")
def found(installed_vllm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short_circuit") / "engine"
    script, patches = "short_circuit_script.py", ["mooncake_cpu_layout"]
    with ScriptProcess(folder, script, patches, str(LATER), recording=False) as process:
        return process.result()


def result(found: dict, name: str) -> dict:
    if name.startswith("later") and name not in found:
        pytest.skip(f"no {LATER.relative_to(REPOSITORY)}: run make vllm-releases")
    return found[name]


@pytest.mark.parametrize("name", RUNS)
def test_every_step_reports_what_upstream_reports(found, name):
    """Told the same on one clock, in each role; expiry to the instant included."""
    run = result(found, name)
    assert run["problems"] == []
    counts = run["counts"]
    assert counts["reports"] > 500
    assert counts["expiries"] > 50


@pytest.mark.parametrize("name", RUNS)
def test_loops_are_asked_only_if_they_have_something_to_report(found, name):
    """Or if an entry expires while it is being sent."""
    assert result(found, name)["counts"].get("asks_in_vain", 0) == 0


@pytest.mark.parametrize("name", STRESS)
def test_free_running_threads_lose_double_and_delay_nothing(found, name):
    """Known ids by the next step, stuck and failed sends within 1 s of the timeout."""
    run = result(found, name)
    assert run["problems"] == []
    assert min(run["counts"].values()) > 5
    assert len(run["counts"]) == 7


def test_free_running_threads_report_the_ids_that_upstream_reports(found):
    assert found["stress"]["reported"] == found["stress_upstream"]["reported"]


@pytest.mark.parametrize("name", ["quiet", "later_quiet"])
def test_nothing_is_asked_of_the_loops_when_nothing_can_be_reported(found, name):
    asks = result(found, name)
    assert len(asks) == 7
    assert not any(asks.values())


def test_upstream_asks_both_loops_in_every_step(found):
    assert set(found["quiet_upstream"].values()) == {2 * 200}


def test_a_stuck_send_is_freed_within_a_second_of_its_timeout(found):
    """In an engine that other requests keep stepping; the timeout is 1 s."""
    assert 1.0 <= found["stuck"]["taken_s"] <= 2.0


def test_transfers_of_a_real_engine_still_end(found):
    assert found["stuck"]["problems"] == []
    assert found["stuck"]["pulled_tokens"] == 70


def test_each_block_and_each_condition_is_needed(found):
    assert len(found["mutants"]) == 4 + 7
    assert [name for name, noticed in found["mutants"].items() if not noticed] == []
