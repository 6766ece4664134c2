# SPDX-License-Identifier: Apache-2.0
"""A user's own Python and connector, measured with one command, and left alone.

`kvtax sweep` from the checkout, and `kvtax gate` from the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.verdict.axes import growth
from tests.test_wheel import UV, built

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# 60 us per step and 1,000 cached blocks. No hook of 0.18.1 gives it the block pool, so
# it looks for the scheduler that calls it.
GROWS_WITH_CACHE = """
import sys, time
from connectors.noop import NoopConnector

def block_pool():
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "kv_cache_manager"):
        frame = frame.f_back
    return frame.f_locals["self"].kv_cache_manager.block_pool

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        cached = len(block_pool().cached_block_hash_to_block)
        until = time.perf_counter() + 60e-9 * cached
        while time.perf_counter() < until:
            pass
        return super().build_connector_meta(scheduler_output)
"""
SWEEP_LIMITS = """
[configs.Mine]
verdicts = ["flat"]
slope_us_per_1k_blocks = { "scheduler.build_connector_meta" = 2.0 }
"""


@pytest.fixture
def their_venv(tmp_path) -> Path:
    """An environment of somebody else, with our packages."""
    venv = tmp_path / "venv"
    packages = venv / "lib" / Path(sysconfig.get_path("purelib")).parent.name
    packages = packages / "site-packages"
    packages.mkdir(parents=True)
    (packages / "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    for library in Path(sys.prefix, "lib").glob("*.so*"):
        (venv / "lib" / library.name).symlink_to(library)
    return venv


def test_a_connector_that_grows_breaks_its_limits_and_the_python_keeps_every_byte(
    their_venv, tmp_path
):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "kv.py").write_text(GROWS_WITH_CACHE)
    limits = tmp_path / "limits.toml"
    limits.write_text(SWEEP_LIMITS)
    before = {path: path.lstat().st_mtime_ns for path in their_venv.rglob("*")}
    ours = {path: path.stat().st_mtime_ns for path in packages_of_vllm()}
    told = ["--profile", "cpu-smoke", "--repeats", "2", "--out", tmp_path / "run"]
    told += ["--python", their_venv / "bin" / "python", "--limits", limits]
    told += ["--connector", "mypkg.kv:Mine"]
    sweep = subprocess.run(
        ["bash", REPOSITORY / "run_all.sh", *told],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert sweep.returncode == 1, sweep.stderr
    assert (
        "`Mine`: verdict is grows, `scheduler.build_connector_meta` +" in sweep.stdout
    )
    assert {path: path.lstat().st_mtime_ns for path in their_venv.rglob("*")} == before
    assert {path: path.stat().st_mtime_ns for path in packages_of_vllm()} == ours


def packages_of_vllm() -> list[Path]:
    """All files of the installed vLLM."""
    folder = Path(sysconfig.get_path("purelib"), "vllm")
    return [path for path in folder.rglob("*") if path.is_file()]


# 5 us per running request.
GROWS_WITH_RUNNING = """
import time
from connectors.noop import NoopConnector

class Mine(NoopConnector):
    def build_connector_meta(self, scheduler_output):
        until = time.perf_counter() + 5e-6 * len(scheduler_output.num_scheduled_tokens)
        while time.perf_counter() < until:
            pass
        return super().build_connector_meta(scheduler_output)
"""
GATE_LIMITS = '[axes.running]\nshape = { connector = "flat" }\n'


@pytest.fixture(scope="module")
def venv(tmp_path_factory) -> Path:
    """An environment with vLLM and the wheel, outside of the checkout."""
    folder = tmp_path_factory.mktemp("author")
    venv = folder / "venv"
    python = str(venv / "bin" / "python")
    install = [UV, "pip", "install", "-q", "--python", python]
    subprocess.run([UV, "venv", "-q", "--python", "3.11", str(venv)], check=True)
    subprocess.run(
        [*install, "--no-deps", "-r", str(REPOSITORY / "locks" / "cpu.txt")], check=True
    )
    subprocess.run([*install, str(built(folder / "wheel"))], check=True)
    return venv


@pytest.fixture
def gate(venv, tmp_path):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "kv.py").write_text(GROWS_WITH_RUNNING)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [venv / "bin" / "kvtax", "gate", *map(str, arguments)],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.serial
def test_a_connector_in_the_working_folder_breaks_its_limit(gate, venv, tmp_path):
    vllm = next(venv.glob("lib/python*/site-packages/vllm"))
    before = {path: path.stat().st_mtime_ns for path in vllm.rglob("*")}
    (tmp_path / "limits.toml").write_text(GATE_LIMITS)
    out = tmp_path / "cell.json"
    run = gate("mypkg.kv:Mine", "--limits", "limits.toml", "--out", out)
    assert run.returncode == 1, run.stderr
    cell = read_document(out, CellRecord)
    grown = growth(cell, "running", "scheduler.build_connector_meta_us")
    assert grown and grown.slope.ci95[0] > 4
    assert cell.provenance["git_commit"] is None
    assert {path: path.stat().st_mtime_ns for path in vllm.rglob("*")} == before


@pytest.mark.serial
def test_exit_codes_tell_bad_input_from_what_did_not_start(gate):
    assert gate("mypkg.kv:Missing").returncode == 3
    assert gate("no colon or name").returncode == 2
    assert gate("mypkg.kv:Mine", "--vllm", "0.32.0").returncode == 2
    assert gate("mypkg.kv:Mine", "--python", "/bin/false").returncode == 2
