# SPDX-License-Identifier: Apache-2.0
"""`kvtax run` before a made-up vLLM: what it says, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.cli import Exit

FILES = {
    "__init__.py": "",
    "_version.py": "__version__ = version = '0.18.1'\n",
    "v1/__init__.py": "",
    "v1/engine/__init__.py": "",
    "v1/engine/core.py": "class EngineCore:\n    def __init__(self):\n"
    "        load_general_plugins()\n",
    "v1/worker/__init__.py": "",
    "v1/worker/worker_base.py": "class WorkerWrapperBase:\n"
    "    def init_worker(self):\n        load_general_plugins()\n",
}
USED = """
import inspect, vllm.v1.engine.core as core
print("kvtax_probe" in inspect.getsource(core))
"""


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with the package, and a script that uses it."""
    site = tmp_path / "site"
    for path, text in FILES.items():
        (site / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm" / path).write_text(text)
    (tmp_path / "serve.py").write_text(USED)
    (tmp_path / "tmp").mkdir()
    return site


def run(site: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    kvtax = [sys.executable, "-m", "kvtax", "run", "--records", "records", "--"]
    own = {
        "PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}",
        "TMPDIR": str(site.parent / "tmp"),
    }
    return subprocess.run(
        [*kvtax, *command],
        cwd=site.parent,
        env=os.environ | own | env,
        capture_output=True,
        text=True,
    )


def test_a_command_that_is_patched_ends_with_its_own_code(site):
    done = run(site, sys.executable, "serve.py")
    assert (done.returncode, done.stdout) == (Exit.GOOD, "True\n")
    gets, never = done.stderr.splitlines()
    assert gets.endswith("gets step_timing_v2")
    assert never == "kvtax: never imported: vllm.v1.worker.worker_base"
    assert not [*(site.parent / "tmp").iterdir()]


def test_a_command_in_which_nothing_was_patched_is_code_3(site):
    done = run(site, sys.executable, "-c", "import vllm")
    assert done.returncode == Exit.NOT_MEASURED
    assert "never imported: vllm.v1.engine.core, vllm.v1.worker" in done.stderr
    assert "so nothing was patched" in done.stderr
    done = run(site, sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7 and "so nothing was patched" in done.stderr
    # Seen at the end alone: a program of which we know nothing.
    alone = (
        "import os, sys; os.execve(sys.executable, [sys.executable, 'serve.py'], {})"
    )
    done = run(
        site, sys.executable, "-c", alone.replace("{}", f"{{'PYTHONPATH': '{site}'}}")
    )
    assert (done.returncode, done.stdout) == (Exit.NOT_MEASURED, "False\n")


def test_a_command_that_shuts_the_patches_out_is_refused(site):
    done = run(site, sys.executable, "-I", "serve.py")
    assert (done.returncode, done.stdout) == (Exit.BAD_INPUT, "")
    assert "-I reads no PYTHONPATH" in done.stderr


def test_a_tree_of_links_is_patched(site, tmp_path):
    linked = tmp_path / "links" / "vllm"
    for path in filter(Path.is_file, (site / "vllm").rglob("*")):
        place = linked / path.relative_to(site / "vllm")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    done = run(linked.parent, sys.executable, "serve.py", TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (Exit.GOOD, "True\n"), done.stderr


def test_without_a_folder_for_temporary_files_tmpdir_is_named(site):
    script = (
        "import tempfile, sys; from kvtax.cli import main;"
        "tempfile._candidate_tempdir_list = lambda: ['/proc'];"
        "sys.exit(main(['run', '--records', 'r', '--', sys.executable, 'serve.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == Exit.BAD_INPUT
    assert "set TMPDIR to a folder that may be written" in done.stderr
