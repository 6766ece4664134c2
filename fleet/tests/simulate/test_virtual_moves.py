# SPDX-License-Identifier: Apache-2.0
"""KV moves through the proxy in virtual time, by each connector that can move it."""

from __future__ import annotations

import pytest
from fleet.tests.simulate.two_arms import run

from kvtax_fleet.analyze.arm_runs import ArmRun, read_run

pytestmark = pytest.mark.slow

EXPERIMENT = """
summary = "KV moves between two instances, in virtual time"
profile = "h20-30b-a3b"
instances = 2
concurrency = [2]
repeats = 1
baseline = "mooncake"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 8
max_turns = 3
max_output_tokens = 40
max_think_s = 0

[arms.mooncake]
policy = "elastic"
parameters = { warm_tokens = 1000, heavy_tokens = 4000 }
connector = "mooncake_both_fixed"

[arms.nixl]
policy = "elastic"
parameters = { warm_tokens = 1000, heavy_tokens = 4000 }
connector = "nixl_both"

# A session leaves an instance that has anything to do.
[arms.direct_read]
policy = "direct_read"
parameters = { alpha = 0, overload = 0 }
connector = "direct_read_idle"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArmRun]:
    folder = tmp_path_factory.mktemp("moves")
    (folder / "moves.toml").write_text(EXPERIMENT)
    done = run(folder / "moves.toml", folder / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return {one.info.arm.partition("@")[0]: one for one in read_run(folder / "run")}


@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
def test_heavy_prompts_are_prefilled_elsewhere_and_their_kv_arrives(
    runs: dict[str, ArmRun], connector: str
) -> None:
    one = runs[connector]
    assert {request.status for request in one.requests} == {"ok"}
    offloads = [end.offload for end in one.decision_ends if end.offload is not None]
    assert offloads
    assert {offload.failure for offload in offloads} == {None}
    for offload in offloads:
        assert offload.begun_ns <= offload.decode_asked_ns < offload.ended_ns
        # Over NIXL, D is asked when P has answered.
        if connector == "nixl":
            assert offload.decode_asked_ns >= offload.prefilled_ns


def test_the_prefix_of_a_session_that_moves_is_read(runs: dict[str, ArmRun]) -> None:
    one = runs["direct_read"]
    assert {request.status for request in one.requests} == {"ok"}
    assert sum(decision.read_from is not None for decision in one.decisions) >= 2
    after = "".join(
        path.read_text() for path in (one.folder / "metrics").glob("*.after.prom")
    )
    (*read_tokens,) = (
        float(line.split()[-1])
        for line in after.splitlines()
        if "external_kv_transfer" in line
    )
    assert sum(read_tokens) > 1_000
