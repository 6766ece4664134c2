# SPDX-License-Identifier: Apache-2.0
"""tests/patched shows each test that runs inside a patched vLLM as it ended there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY

pytestmark = pytest.mark.slow

INSIDE = """
import os
import sys
import pytest

PATCHES = ["block_pool_delta_listener"]
NAMES = {"good": 1, "bad": 2}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [1, 2])
def test_of(name, number):
    listener = "vllm.v1.core.block_pool_listener"
    found = [finder.find_spec(listener, None) for finder in sys.meta_path]
    assert any(found), "not patched"
    print("printed")
    assert name == "good", "not good"


def test_skipped():
    pytest.skip("for a reason")


@pytest.mark.long
def test_left_out():
    raise AssertionError("not selected")


def test_crash():
    os._exit(3)


def test_after_the_crash():
    pass
"""
FOR_ANOTHER = 'PATCHES = []\nONLY = "0.0"\ndef test_it(): assert False\n'
UNREADABLE = {
    "class": "PATCHES = []\nclass TestMore:\n    def test_it(self): pass\n",
    "values": "PATCHES = []\n"
    "@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pass\n",
    "mark": "PATCHES = []\n@pytest.mark.skip\ndef test_it(): pass\n",
    "patches": "PATCHES = names()\n",
}


def run(folder: Path, modules: dict[str, str]) -> tuple[str, dict[str, str]]:
    """What pytest prints, and the word of its summary for each test."""
    patched = REPOSITORY / "tests" / "patched"
    shutil.copy(patched / "inside.py", folder)
    # No vLLM is imported, so that a zygote would only cost time.
    text = (patched / "conftest.py").read_text()
    cold = text.replace("engine.preloaded import Preloaded", "proc import supervise")
    cold = cold.replace("Preloaded(", "supervise.Supervised(")
    (folder / "conftest.py").write_text(cold)
    for name, module in modules.items():
        (folder / f"test_{name}.py").write_text(module)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  long\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-m", "not long", "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
        text=True,
        capture_output=True,
        timeout=1_200,
        check=False,
    )
    summary = r"^(PASSED|FAILED|ERROR) test_(\S*)"
    outcomes = re.findall(summary, ended.stdout, re.MULTILINE)
    return ended.stdout, {test: word for word, test in outcomes}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
def test_each_test_ends_as_it_did_inside(tmp_path):
    output, outcomes = run(tmp_path, {"inside": INSIDE, "other": FOR_ANOTHER})
    assert outcomes == {
        "inside.py::test_of[1-good]": "PASSED",
        "inside.py::test_of[2-good]": "PASSED",
        "inside.py::test_of[1-bad]": "FAILED",
        "inside.py::test_of[2-bad]": "FAILED",
        "inside.py::test_crash": "FAILED",
        "inside.py::test_after_the_crash": "FAILED",
    }, output
    assert "for a reason" in output
    assert "AssertionError: not good" in output
    assert "--- Captured stdout call ---\nprinted" in output
    assert "what it tests is for 0.0 alone" in output


def test_what_cannot_be_read_off_the_text_is_refused(tmp_path):
    _, outcomes = run(tmp_path, UNREADABLE)
    assert outcomes == {f"{name}.py": "ERROR" for name in UNREADABLE}
