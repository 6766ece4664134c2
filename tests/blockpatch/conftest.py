# SPDX-License-Identifier: Apache-2.0
"""A synthetic package tree and patches for it, fresh for every test."""

import tempfile
from pathlib import Path

import pytest
from patchlab import make_patches, make_tree


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
