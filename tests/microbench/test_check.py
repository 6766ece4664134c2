# SPDX-License-Identifier: Apache-2.0
"""run_all.sh --check says all that would stop a sweep, and starts no server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lab.paths import REPOSITORY
from tests.fake_gpu import path_with_gpus

pytestmark = pytest.mark.slow


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "microbench.sweep", "--check", *arguments],
        cwd=REPOSITORY,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def test_a_machine_that_can_measure_is_said_to(tmp_path):
    runs = REPOSITORY / "runs"
    before = set(runs.glob("*"))
    done = check("--profile", "cpu-smoke", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "cpu-smoke can be measured here" in done.stdout
    assert set(runs.glob("*")) == before
    assert not (tmp_path / "run").exists()


def test_all_reasons_are_said_at_once(tmp_path):
    path = path_with_gpus(tmp_path, "0, Tesla V100, 4096, 3000, 470.82.01, 7.0")
    done = check("--profile", "gpu", PATH=path)
    assert done.returncode == 1
    reasons = done.stderr
    assert "profile gpu cannot be measured here" in reasons
    assert "4 GiB of GPU memory" in reasons
    assert "3000 of 4096 MiB are in use" in reasons
    assert "no bfloat16" in reasons
    assert "driver 470.82.01 is too old" in reasons
    assert "vllm is not installed: run bash setup.sh gpu" in reasons


def test_what_keeps_vllm_from_being_tried_is_said_like_the_rest(tmp_path):
    (tmp_path / "libtcmalloc_minimal.so.4").touch()
    done = check("--only", "plain", "--only", "noop", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    (reason,) = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    assert "setup.sh" in reason and "libtcmalloc_minimal.so.4" in reason


def test_what_stops_several_configs_is_said_once(tmp_path):
    # The writes of Mooncake's check need this library.
    (tmp_path / "libibverbs.so.1").touch()
    both = ("--only", "mooncake_both", "--only", "mooncake_producer")
    done = check(*both, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    (reason,) = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    assert reason.startswith("  - mooncake_both, mooncake_producer: ")
