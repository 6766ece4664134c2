# SPDX-License-Identifier: Apache-2.0
"""Runs a script of this folder on a private tree of the installed vLLM, patched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.paths import REPOSITORY
from lab.serving.tree import build_tree, installed_package

DEADLINE_S = 300
NULL_MODEL = REPOSITORY / "lab" / "serving" / "vllm_plugin"


def run_script(
    folder: Path,
    script: str,
    patches: list[str],
    *arguments: str,
    env: dict[str, str] | None = None,
) -> dict:
    """What `script(result, *arguments)` wrote into its result file.

    Skips the test if vLLM is not installed; fails it if the script fails.
    """
    try:
        package = installed_package("vllm")
    except ModuleNotFoundError:
        pytest.skip("vllm is not installed")
    build_tree(folder / "tree", package, patches, {})
    result = folder / "result.json"
    path = os.pathsep.join(map(str, (folder / "tree", NULL_MODEL, REPOSITORY)))
    process = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), result, *arguments],
        env=os.environ | (env or {}) | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4_000:]
    return json.loads(result.read_text())
