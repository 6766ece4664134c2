# SPDX-License-Identifier: Apache-2.0
"""What must be equal for a direct read is compared, and named if it differs."""

from __future__ import annotations

import shutil

import pytest
from patched_tree import run_script

from connectors.direct_read.fingerprint import difference
from lab.serving.environment import engine_environment
from lab.serving.null_model import null_checkpoint
from lab.serving.ports import reserve
from lab.serving.settings import CPU_ENGINE


def test_what_differs_is_named_with_both_values():
    ours = {"model": "m", "block_size": "16", "ours": "1"}
    assert difference(ours, dict(ours)) is None
    theirs = {"model": "m", "block_size": "32", "theirs": "2"}
    assert difference(ours, theirs) == (
        "block_size is 16 here and 32 there; ours is 1 here and not given there; "
        "theirs is not given here and 2 there"
    )


def test_a_different_seed_is_told_with_what_to_set():
    assert "PYTHONHASHSEED" in difference({"NONE_HASH": "1"}, {"NONE_HASH": "2"})


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("fingerprint")
    model = null_checkpoint(folder / "model")
    other_path = shutil.copytree(model, folder / "elsewhere" / "model")
    env = engine_environment(folder / "tree", CPU_ENGINE, reserve(1)[0])
    arguments = str(model), str(other_path)
    found = run_script(folder, "fingerprint_script.py", [], *arguments, env=env)
    return found | {"path": str(model)}


@pytest.mark.long
def test_equal_configs_are_equal_and_each_difference_is_named(found):
    differences = found["differences"]
    assert differences.pop("nothing") is None
    assert len(differences) > 7
    for name, text in differences.items():
        assert text is not None, name
        assert f"{name} is " in text, text


@pytest.mark.long
def test_neither_the_seed_itself_nor_the_path_is_given_away(found):
    for secret in (found["NONE_HASH"], found["path"]):
        assert not any(secret in value for value in found["ours"].values())
