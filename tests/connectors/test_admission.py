# SPDX-License-Identifier: Apache-2.0
"""However many requests pull, and however few blocks there are, all of them end."""

from __future__ import annotations

import json

import pytest
from patched_tree import run_script

from lab.serving.environment import engine_environment
from lab.serving.null_model import null_checkpoint
from lab.serving.ports import reserve
from lab.serving.settings import CPU_ENGINE

pytestmark = pytest.mark.long

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
AS_IT_IS = [["as it is", seed] for seed in (1, 2, 3)]
CONTROLS = ["admits all", "lets none pass", "reserves nothing"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("admission")
    model = null_checkpoint(folder / "model")
    env = engine_environment(folder / "tree", CPU_ENGINE, reserve(1)[0])
    runs = json.dumps(AS_IT_IS + [[control, 1] for control in CONTROLS])
    arguments = str(model), runs
    return run_script(folder, "admission_script.py", PATCHES, *arguments, env=env)


def test_no_request_waits_for_good(runs):
    for found in runs[: len(AS_IT_IS)]:
        assert found["ended"], found
        assert found["pulls"] > 100, found
        assert found["held_back"] > 100, found
        assert found["left_waiting"] == 0, found


@pytest.mark.parametrize("control", CONTROLS)
def test_without_a_rule_the_engine_stands_still(runs, control):
    found = runs[len(AS_IT_IS) + CONTROLS.index(control)]
    assert not found["ended"], found
