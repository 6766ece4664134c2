# SPDX-License-Identifier: Apache-2.0
"""vLLM's modules once more, with other patches than the running package has.

A test that compares with upstream, or leaves a block of a patch out, needs several
versions of one module in one process. Each is a module of its own, loaded from a
patched copy of the file.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import os
import shutil
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

from kvtax import patcher
from kvtax.patcher.at_import import SOURCES
from kvtax.paths import PATCHES

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
SCHEDULER = "v1/core/sched/scheduler.py"
STATS = "v1/metrics/stats.py"

# The running package, and the files of it that are patched at import.
RUNNING = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
OVERLAY = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0], SOURCES, "vllm")

_numbers = count()


def without_garbage_collection(function):
    """For functions that parse: Python 3.11 cannot parse while it parses.

    Collected garbage, such as a task whose exception nobody retrieved, may format a
    traceback, which parses; the outer parse then ends with a SystemError.
    """

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        gc.disable()
        try:
            return function(*arguments, **options)
        finally:
            gc.enable()

    return wrapped


@without_garbage_collection
def patch(name: str, without: str | None = None) -> patcher.Patch:
    """A patch of ours, with one of its blocks left out if it is named."""
    loaded = patcher.load_patch(PATCHES / name)
    blocks = tuple(block for block in loaded.blocks if block.id != without)
    assert (len(blocks) < len(loaded.blocks)) == (without is not None), without
    return dataclasses.replace(loaded, blocks=blocks)


@without_garbage_collection
def block_ids(name: str, package: Path, file: str) -> list[str]:
    """The blocks of a patch that are for one file of the release of `package`."""
    loaded = patcher.load_patch(PATCHES / name)
    blocks = patcher.active_blocks(patcher.Tree(package, only_read=True), loaded)
    return [block.id for block in blocks if block.file == file]


@without_garbage_collection
def patched_source(
    package: Path, file: str, patches: list[patcher.Patch], place: Path
) -> Path:
    """A copy of one file of `package` in a new folder below `place`.

    It has those blocks of the patches that are for it.
    """
    tree = place / str(next(_numbers)) / package.name
    for path in (file, "__init__.py", "_version.py"):
        patched = package == RUNNING and (OVERLAY / path).exists()
        source = (OVERLAY if patched else package) / path
        if source.exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / path)
    metadata = package.parent / "PKG-INFO"
    if metadata.exists():
        shutil.copy(metadata, tree.parent)
    parts = [
        dataclasses.replace(
            patch, blocks=tuple(block for block in patch.blocks if block.file == file)
        )
        for patch in patches
    ]
    patcher.apply(patcher.Tree(tree), parts)
    return tree / file


@without_garbage_collection
def load(source: Path) -> ModuleType:
    """The file as a new module of vLLM's; its classes are equal to no other's."""
    name = f"vllm.variant_{next(_numbers)}_{source.stem}"
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
