# SPDX-License-Identifier: Apache-2.0
"""Private copies of the files of vLLM's releases, to be patched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from releases import package_of

import blockpatch
from blockpatch import Patch, Tree
from lab.paths import PATCHES
from lab.serving.installation import installation

ALL = blockpatch.load_patches(PATCHES)
V1, V2 = ALL["step_timing_v1"], ALL["step_timing_v2"]
RELEASES = sorted({version for patch in (V1, V2) for version in patch.tested})

SCHEDULER = "v1/core/sched/scheduler.py"
CORE = "v1/engine/core.py"
WORKER = "v1/worker/gpu_worker.py"
MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"
V2_RUNNER = "v1/worker/gpu/kv_connector.py"
FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
MULTI = "distributed/kv_transfer/kv_connector/v1/multi_connector.py"
# What step timing adds whole.
RECORDER = {
    f"v1/step_{name}.py" for name in ("records", "record_file", "connector", "threads")
}


def copy_of(patch: Patch, source: Path, place: Path) -> Tree:
    """A private copy of the files of a package that any patch touches."""
    tree = place / patch.package
    patches = [other for other in ALL.values() if other.package == patch.package]
    touched = {spec.file for other in patches for spec in other.blocks}
    for path in touched | {"__init__.py", "_version.py"}:
        if (source / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, tree / path)
    return Tree(tree)


def copy_of_installed(patch: Patch, place: Path) -> Tree:
    try:
        return copy_of(patch, installation().package(patch.package), place)
    except ModuleNotFoundError:
        pytest.skip(f"{patch.package} is not installed")


def copy_of_release(version: str, place: Path) -> Tree:
    """A private copy of one release's Python files."""
    return copy_of(V1, package_of(version), place)


def python_files(tree: Tree) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree.root)): path.read_bytes()
        for path in sorted(tree.root.rglob("*.py"))
    }


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in after if before.get(path) != after[path]}
