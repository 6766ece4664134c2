# SPDX-License-Identifier: Apache-2.0
"""A synthetic package tree and patches for it, fresh for every test."""

import tempfile
from functools import partial
from pathlib import Path

import pytest

from kvtax.patcher import apply, revert
from tests.patcher.patchlab import make_patches, make_tree, snapshot


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "site")


@pytest.fixture
def patches(tmp_path):
    return make_patches(tmp_path / "patches")


@pytest.fixture(scope="module")
def memory_folder():
    """A folder in memory where there is one: hundreds of calls, each with fsyncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def two_calls(memory_folder):
    """Root of a tree, patches, and by verb a call with the states around it."""
    tree = make_tree(memory_folder / "site")
    patches = make_patches(memory_folder / "patches")
    apply(tree, [patches["gamma"]])
    old = snapshot(tree.root)
    come = partial(apply, tree, [patches["alpha"], patches["beta"]])
    go = partial(revert, tree, ["alpha", "beta"])
    come()
    new = snapshot(tree.root)
    return tree.root, patches, {"apply": (come, old, new), "revert": (go, new, old)}
