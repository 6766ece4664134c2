# SPDX-License-Identifier: Apache-2.0
"""Private copies of the files of vLLM's releases, to be patched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtax import patcher
from kvtax.engine.installation import installation
from kvtax.patcher import Patch, Tree
from kvtax.paths import CONFIGS, PATCHES
from tests.releases import package_of

ALL = patcher.load_patches(PATCHES)
STEP_TIMING = ALL["step_timing_v2"]
TESTED = patcher.load_releases(CONFIGS / "releases.toml")
RELEASES = [release.version for release in TESTED["vllm"]]


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
    return copy_of(STEP_TIMING, package_of(version), place)


def python_files(tree: Tree) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree.root)): path.read_bytes()
        for path in sorted(tree.root.rglob("*.py"))
    }


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {path for path in after if before.get(path) != after[path]}
