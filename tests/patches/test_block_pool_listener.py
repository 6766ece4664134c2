# SPDX-License-Identifier: Apache-2.0
"""Listeners of vLLM's real block pool know exactly what it holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from listener_mutants import MUTANTS, PATCH
from vllm_process import ScriptProcess

from lab.paths import REPOSITORY
from lab.serving.tree import installed_package

pytestmark = pytest.mark.slow

INSTALLED = "0.18.1"
# Those whose Python files run with the installed one's dependencies.
RUNNABLE = [INSTALLED, "0.22.1"]


def package_of(release: str) -> Path:
    if release == INSTALLED:
        return installed_package("vllm")
    package = REPOSITORY / "third_party" / f"vllm-{release}" / "vllm"
    if not package.is_dir():
        pytest.skip(f"no {package.relative_to(REPOSITORY)}: run make vllm-releases")
    return package


def run(folder: Path, release: str, *arguments: str) -> dict:
    base, patches = package_of(release), [PATCH.name]
    script = "listener_script.py"
    with ScriptProcess(folder, script, patches, *arguments, base=base) as process:
        return process.result()


@pytest.fixture(scope="module")
def installed(installed_vllm, tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("listener") / INSTALLED, INSTALLED, "mutants")


@pytest.fixture(scope="module", params=RUNNABLE)
def found(request, installed, tmp_path_factory) -> dict:
    if request.param == INSTALLED:
        return installed
    return run(tmp_path_factory.mktemp("listener") / request.param, request.param)


def test_listeners_and_trackers_know_what_the_pool_holds(found):
    """listener_cases.py one by one, and listener_machine.py in any order."""
    assert not found["failed"], "\n".join(found["failed"].values())


def test_machine_came_upon_what_makes_the_pool_change(found):
    counts = found["counts"]
    assert counts["operations"] > 5_000
    assert counts["takes"] > 1_000
    assert counts["evictions"] > 1_000
    for event in (
        "duplicates",
        "hits",
        "preemptions",
        "resets",
        "refused resets",
        "late joins",
        "pops of nothing",
        "overflows",
        "wrong by walk",  # what the walk cannot see, and the tracker did
    ):
        assert counts[event] > 0, event


@pytest.mark.parametrize("mutant", MUTANTS)
def test_machine_or_cases_fail_when_one_thing_is_wrong(installed, mutant):
    assert installed["killed_by"][mutant]


MUTATING = {"pop", "popitem", "clear", "update", "setdefault"}


def writers(module: ast.Module, attribute: str) -> set[str]:
    """Methods that bind `.attribute`, or change the dict that it is."""

    def is_it(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == attribute

    def writes(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and is_it(node.value):
            return node.attr in MUTATING
        if isinstance(node, ast.Subscript) and is_it(node.value):
            return not isinstance(node.ctx, ast.Load)
        return is_it(node) and not isinstance(node.ctx, ast.Load)

    return {
        f"{owner.name}.{method.name}"
        for owner in module.body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
        if any(writes(node) for node in ast.walk(method))
    }


@pytest.mark.parametrize("release", PATCH.tested)
def test_keys_enter_and_leave_only_where_the_patch_listens(installed_vllm, release):
    """Also on the release whose pool cannot be run here."""
    package = package_of(release)
    block_pool = package / "v1/core/block_pool.py"
    module = ast.parse(block_pool.read_bytes())
    own_map = "BlockHashToBlockMap."
    assert {name for name in writers(module, "_cache") if name.startswith(own_map)} == {
        f"{own_map}{method}" for method in ("__init__", "insert", "pop")
    }
    assert writers(module, "cached_block_hash_to_block") - {
        # Through the map's own methods.
        "BlockPool._maybe_evict_cached_block",
        "BlockPool._remove_cached_block_hashes",
    } == {"BlockPool.__init__", "BlockPool.reset_prefix_cache"}
    names = (b"BlockHashToBlockMap", b"cached_block_hash_to_block._cache")
    others = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path != block_pool and any(name in path.read_bytes() for name in names)
    }
    assert others == set()
