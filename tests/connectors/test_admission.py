# SPDX-License-Identifier: Apache-2.0
"""However many requests pull, and however few blocks there are, all of them end."""

from __future__ import annotations

import json

import msgspec
import pytest
from patched_tree import run_script

from lab.serving.null_model import write_model
from lab.serving.server import environment, free_ports
from microbench.profile import load_profile

pytestmark = pytest.mark.long

PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
AS_IT_IS = [["as it is", seed] for seed in (1, 2, 3)]
CONTROLS = ["admits all", "lets none pass", "reserves nothing"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("admission")
    profile = msgspec.structs.replace(load_profile("cpu-smoke"), forward_us=0)
    model, _ = write_model(folder / "model", profile)
    env = environment(folder / "tree", profile, folder, {}, free_ports(2))
    del env["KVTAX_STEP_RECORDS_DIR"]
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
