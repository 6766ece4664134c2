# SPDX-License-Identifier: Apache-2.0
"""The patches on the files of every release they say they fit."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax import patcher
from kvtax.engine.installation import installation
from kvtax.patcher import Patch, Tree
from kvtax.patcher.at_import import SOURCES
from kvtax.paths import CONFIGS, PATCHES
from tests.releases import package_of

ALL = patcher.load_patches(PATCHES)
STEP_TIMING = ALL["step_timing_v2"]
TESTED = patcher.load_releases(CONFIGS / "releases.toml")
RELEASES = [release.version for release in TESTED["vllm"]]


def copy_of(
    patch: Patch, source: Path, place: Path, patches: Collection[Patch] = ()
) -> Tree:
    """A private copy of the files of a package that `patches`, or any, touch."""
    tree = place / patch.package
    if not patches:
        patches = [other for other in ALL.values() if other.package == patch.package]
    touched = {spec.file for other in patches for spec in other.blocks}
    for path in touched | {"__init__.py", "_version.py"}:
        if (source / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, tree / path)
    return Tree(tree)


def copy_of_installed(patch: Patch, place: Path, patches: Collection[Patch]) -> Tree:
    try:
        return copy_of(patch, installation().package(patch.package), place, patches)
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


pytestmark = pytest.mark.slow


@pytest.fixture(params=RELEASES)
def release(request, tmp_path) -> Tree:
    return copy_of_release(request.param, tmp_path)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        (name, version)
        for name, patch in ALL.items()
        for version in patch.tested(TESTED)
    ],
)
def test_every_patch_comes_and_goes_to_the_byte_and_is_the_same_at_import(
    name, version, tmp_path
):
    patch = ALL[name]
    patches = [patch, *(ALL[relation.other] for relation in patch.relations)]
    if patch.package == "vllm":
        tree = copy_of(patch, package_of(version), tmp_path, patches)
    else:
        tree = copy_of_installed(patch, tmp_path, patches)
    before = python_files(tree)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    patcher.write_overlay(overlay, patcher.plan_imports([patch], {}, lambda _: tree))
    patcher.apply(tree, [patch])
    after = python_files(tree)
    at_import = overlay / SOURCES / tree.package
    assert {
        str(path.relative_to(at_import)): path.read_bytes()
        for path in at_import.rglob("*.py")
    } == {path: after[path] for path in changed(before, after)}
    for path in changed(before, after):
        compile(after[path], path, "exec", dont_inherit=True)
    assert changed(before, after)
    patcher.revert(tree, [patch.name])
    assert python_files(tree) == before


RIVALS = [
    name
    for name, patch in ALL.items()
    if any(relation.kind == "conflicts" for relation in patch.relations)
]


@pytest.mark.parametrize("left_out", RIVALS)
def test_all_vllm_patches_together_come_and_go_to_the_byte(release, left_out):
    """All but one of two that conflict."""
    patches = [
        patch
        for patch in ALL.values()
        if patch.package == "vllm" and release.version in patch.tested(TESTED)
        if patch.name != left_out
    ]
    before = python_files(release)
    patcher.apply(release, patches)
    names = [patch.name for patch in patches]
    for some in (names[::2], names[1::2]):
        patcher.revert(release, some)
    assert python_files(release) == before


def test_the_default_set_fits_by_the_code_whatever_the_version(release):
    patches = [ALL[name] for name in patcher.load_sets(PATCHES)["timing"]]
    expected = patcher.check(release, patches).changes
    for version in ("0.29.0", "0.1.dev2", "dev"):
        (release.root / "_version.py").write_text(f"version = {version!r}\n")
        tree = Tree(release.root)
        assert tree.version == version
        assert patcher.check(tree, patches).changes == expected
    before = python_files(release)
    assert patcher.apply(tree, patches).changes == expected
    assert patcher.apply(tree, patches).changes == ()
    patcher.revert(tree, [patch.name for patch in patches])
    assert python_files(tree) == before


LEFT_OUT = {
    # The code of the releases from ... on: what each patch has for other code only.
    "cpu_streams": {
        "0.18.1": {"simple_worker", "simple_backend", "simple_copy", "store"}
        | {"hf3fs", "hf3fs_mock", "hf3fs_layout"},
        "0.22.1": {"hf3fs_layout"},
        "0.25.1": set(),
        "0.30.0": {"hf3fs_layout"},
    },
    "mooncake_cpu_layout": {
        "0.18.1": {"one_region"},
        "0.22.1": {"import", "one_region"},
        "0.25.1": {"import"},
        "0.28.0": {"import", "one_region"},
    },
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_parts_that_are_for_other_code_are_left_out_and_no_others(name, release):
    (left_out,) = [
        parts
        for since, parts in LEFT_OUT[name].items()
        if since == max(s for s in LEFT_OUT[name] if s <= release.version)
    ]
    active = {spec.id for spec in patcher.active_blocks(release, ALL[name])}
    assert {spec.id for spec in ALL[name].blocks} - active == left_out


def test_a_failed_pull_is_for_0_18_and_the_rest_of_the_abort_race_for_all(release):
    patch = ALL["kv_transfer_abort_race"]
    active = patcher.active_blocks(release, patch)
    groups = {spec.optional for spec in active}
    assert ("failed_pulls" in groups) == (release.version == "0.18.1")
    assert ("empty_pull" in groups) == (release.version < "0.32")
    assert {spec.id for spec in patch.blocks if not spec.optional} <= {
        spec.id for spec in active
    }


def test_step_timing_is_two_calls_where_vllm_loads_its_plugins(release):
    patcher.apply(release, [STEP_TIMING])
    for path, function in (
        ("v1/engine/core.py", "__init__"),
        ("v1/worker/worker_base.py", "init_worker"),
    ):
        source = (release.root / path).read_text()
        (place,) = (
            body
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == function
            for body in [[ast.unparse(statement) for statement in node.body]]
            if "install()" in body
        )
        loads = place.index("load_general_plugins()")
        assert place[loads + 1 : loads + 3] == [
            "from vllm.kvtax_probe import install",
            "install()",
        ]


GROUPING = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
Ids = list[int]
Grouping = Callable[[Ids, Ids], tuple[list[Ids], list[Ids]]]


def grouping_of(tree: Tree) -> Grouping:
    """Mooncake's function that merges neighbouring blocks, without its module."""
    (function,) = (
        node
        for node in ast.parse((tree.root / GROUPING).read_text()).body
        if getattr(node, "name", None) == "group_concurrent_contiguous"
    )
    names = {"np": np}
    exec(ast.unparse(function), names)
    return names[function.name]


@pytest.fixture(scope="module", params=RELEASES)
def groupings(request, tmp_path_factory) -> tuple[Grouping, Grouping]:
    """The function before and after the patch."""
    release = copy_of_release(request.param, tmp_path_factory.mktemp("groupings"))
    before = grouping_of(release)
    patcher.apply(release, [ALL["mooncake_sorted_block_groups"]])
    return before, grouping_of(release)


def pairs_moved(grouping: Grouping, source: Ids, target: Ids) -> list[tuple[int, int]]:
    """The pairs of blocks that a sender copies: it takes a group from its first on."""
    moved = []
    for ours, theirs in zip(*grouping(source, target), strict=True):
        assert len(ours) == len(theirs) > 0
        moved += [(ours[0] + i, theirs[0] + i) for i in range(len(ours))]
    return moved


def test_sorted_groups_move_the_same_blocks_in_as_few_groups_as_there_can_be(groupings):
    before, after = groupings
    some_ids = st.lists(st.integers(0, 40), max_size=30, unique=True)

    @given(some_ids, st.randoms())
    def run(source: Ids, chance) -> None:
        target = [block_id + 7 * chance.randrange(2) for block_id in source]
        pairs = list(zip(source, target, strict=True))
        assert sorted(pairs_moved(before, source, target)) == sorted(pairs)
        assert sorted(pairs_moved(after, source, target)) == sorted(pairs)
        followed = {(ours - 1, theirs - 1) for ours, theirs in pairs}
        fewest = len(set(pairs) - followed)
        assert len(after(source, target)[0]) == fewest <= len(before(source, target)[0])

    run()


def test_what_no_caller_may_pass_is_refused_as_before_and_nothing_is_no_group(
    groupings,
):
    for grouping in groupings:
        assert grouping([], []) == ([], [])
        for source, target in (([1, 2, 3], [1]), ([1], [1, 2, 3])):
            with pytest.raises(ValueError, match="shape"):
                grouping(source, target)


PATCH = ALL["block_pool_delta_listener"]


@pytest.mark.parametrize("release", PATCH.tested(TESTED))
def test_keys_enter_and_leave_only_where_the_patch_listens(installed_vllm, release):
    """In the whole package, of which other tests have a part."""
    names = {only.name for only in PATCH.only}
    assert names == {"_cache", "cached_block_hash_to_block", "BlockHashToBlockMap"}
    assert patcher.check(Tree(package_of(release), only_read=True), [PATCH]).changes
