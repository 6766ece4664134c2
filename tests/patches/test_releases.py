# SPDX-License-Identifier: Apache-2.0
"""The patches on the files of every release they say they fit."""

from __future__ import annotations

import ast

import pytest
from hook_places import (
    check_step_ends_right_after_update,
    names_imported,
    names_of_recorders,
)
from release_trees import (
    ALL,
    CORE,
    FACTORY,
    MIXIN,
    MULTI,
    RECORDER,
    RELEASES,
    SCHEDULER,
    V1,
    V2,
    V2_RUNNER,
    WORKER,
    changed,
    copy_of_installed,
    copy_of_release,
    python_files,
)

import blockpatch
from blockpatch import Tree

pytestmark = pytest.mark.slow


@pytest.fixture
def vllm(tmp_path) -> Tree:
    return copy_of_installed(V1, tmp_path)


@pytest.fixture(params=RELEASES)
def release(request, tmp_path) -> Tree:
    return copy_of_release(request.param, tmp_path)


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name, patch in ALL.items() for version in patch.tested],
)
def test_every_patch_comes_and_goes_to_the_byte(name, version, tmp_path):
    patch = ALL[name]
    if patch.package == "vllm":
        tree = copy_of_release(version, tmp_path)
    else:
        tree = copy_of_installed(patch, tmp_path)
    before = python_files(tree)
    blockpatch.apply(tree, [patch])
    after = python_files(tree)
    for path in changed(before, after):
        compile(after[path], path, "exec", dont_inherit=True)
    assert changed(before, after)
    blockpatch.revert(tree, [patch.name])
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
        if patch.package == "vllm" and release.version in patch.tested
        if patch.name != left_out
    ]
    before = python_files(release)
    blockpatch.apply(release, patches)
    for patch in patches:
        blockpatch.revert(release, [patch.name])
    assert python_files(release) == before


def test_v1_survives_v2s_apply_and_revert(vllm):
    before = python_files(vllm)
    blockpatch.apply(vllm, [V1])
    v1_alone = python_files(vllm)
    blockpatch.apply(vllm, [V2])
    both = python_files(vllm)
    blockpatch.revert(vllm, [V2.name])
    assert python_files(vllm) == v1_alone
    blockpatch.revert(vllm, [V1.name])
    assert python_files(vllm) == before

    blockpatch.apply(vllm, [V2])
    blockpatch.apply(vllm, [V1])
    assert python_files(vllm) == both
    blockpatch.revert(vllm, [V2.name])
    assert python_files(vllm) == v1_alone


@pytest.mark.parametrize(
    "names", [[V1.name], [V2.name], [V1.name, V2.name]], ids="+".join
)
def test_step_timing_fits_the_release_and_goes_to_the_byte(release, names):
    before = python_files(release)
    blockpatch.apply(release, [ALL[name] for name in names])
    after = python_files(release)
    files = changed(before, after)
    for path in files:
        compile(after[path], path, "exec", dont_inherit=True)
    expected = {*RECORDER, SCHEDULER, CORE}
    if V2.name in names:
        expected |= {WORKER, MIXIN, V2_RUNNER, FACTORY, MULTI}
    assert files == expected
    for path in files - RECORDER:
        module = ast.parse(after[path])
        assert names_of_recorders(module) == names_imported(module)
    for name in ("step", "step_with_batch_queue"):
        check_step_ends_right_after_update(release, name, len(names))
    blockpatch.revert(release, names)
    assert python_files(release) == before
