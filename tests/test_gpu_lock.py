# SPDX-License-Identifier: Apache-2.0
"""locks/gpu.txt can be installed, and every config can be measured with it.

No GPU is needed: nvidia-smi is pretended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from tests.fake_gpu import H100, path_with_gpus

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Of the environment for GPUs, which is 10 GB and deleted afterwards."""
    uv = shutil.which("uv") or REPOSITORY / ".uv" / "bin" / "uv"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "venv", "bin", "python")
        subprocess.run([uv, "venv", "-q", "-p", sys.executable, made.parents[1]])
        lock = REPOSITORY / "locks" / "gpu.txt"
        sync = [uv, "pip", "sync", "-q", "--require-hashes", "--python", made, lock]
        subprocess.run(sync, check=True)
        yield made


def test_every_configs_patches_apply(python):
    options = ["-q", "-m", "", "-k", "every_config_can_be_built"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, "tests/microbench/test_sweep.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_nothing_but_the_driver_stops_the_gpu_profile(python, tmp_path):
    done = subprocess.run(
        [python, "-m", "kvtax", "sweep", "--profile", "gpu", "--check"],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": path_with_gpus(tmp_path, H100)},
        capture_output=True,
        text=True,
    )
    assert "41 layers and 18000 blocks" in done.stdout
    reasons = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    # Mooncake's engine links the driver's library and that of a network card.
    assert all("Mooncake's transfers" in reason for reason in reasons), done.stderr
    missing = "ImportError: libcuda.so.1", "ImportError: libmlx5.so.1"
    assert done.returncode == 0 or any(each in done.stderr for each in missing)
