# SPDX-License-Identifier: Apache-2.0
"""What enters or leaves the prefix cache does so only where the patch listens."""

from __future__ import annotations

import ast

import pytest

from kvtax import patcher
from kvtax.paths import PATCHES
from tests.patches.release_trees import TESTED
from tests.releases import package_of

pytestmark = pytest.mark.slow

PATCH = patcher.load_patch(PATCHES / "block_pool_delta_listener")
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


@pytest.mark.parametrize("release", PATCH.tested(TESTED))
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
