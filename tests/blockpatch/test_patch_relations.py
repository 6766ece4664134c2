# SPDX-License-Identifier: Apache-2.0
"""A manifest says which other patches it alters, uses, or cannot stand beside."""

from __future__ import annotations

import pytest
from patchlab import block, make_patch, snapshot

from blockpatch import ConflictError, ManifestError, apply, load_patches, revert, status
from blockpatch.cli import main

BLOCK = [block("before", "", "import os", "x = 1")]
OTHER_BLOCK = [block("after", "", "import os", "y = 1")]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "patches"


@pytest.fixture
def rivals(folder):
    make_patch(folder, "one", BLOCK, conflicts={"two": "both count"})
    make_patch(folder, "two", OTHER_BLOCK, conflicts={"one": "both count"})
    return load_patches(folder)


@pytest.fixture
def run(folder, tree, capsys):
    def call(*argv: str) -> str:
        assert main([*argv, "--target", str(tree.root)], folder) == 0
        return capsys.readouterr().out

    return call


def test_rivals_are_refused_together_and_the_tree_is_untouched(tree, rivals):
    before = snapshot(tree.root)
    with pytest.raises(ConflictError, match=r"one and two .*: both count"):
        apply(tree, rivals.values())
    assert snapshot(tree.root) == before


@pytest.mark.parametrize("first, second", [("one", "two"), ("two", "one")])
def test_a_rival_of_what_is_applied_is_refused_until_that_is_reverted(
    tree, rivals, first, second
):
    apply(tree, [rivals[first]])
    with pytest.raises(ConflictError, match="both count"):
        apply(tree, [rivals[second]])
    assert status(tree)[first].state == "applied"
    revert(tree, [first])
    apply(tree, [rivals[second]])


def test_a_conflict_must_stand_in_both_manifests(folder):
    """So that no order of applying gets around it."""
    make_patch(folder, "one", BLOCK, conflicts={"two": "both count"})
    make_patch(folder, "two", OTHER_BLOCK)
    with pytest.raises(ManifestError, match="stands in both"):
        load_patches(folder)


@pytest.mark.parametrize("kind", ["alters", "uses", "conflicts"])
@pytest.mark.parametrize("other", ["missing", "one"])
def test_a_relation_names_another_patch_that_is_there(folder, kind, other):
    make_patch(folder, "one", BLOCK, **{kind: {other: "why"}})
    with pytest.raises(ManifestError, match=rf"one/patch.toml: {kind}\.{other}"):
        load_patches(folder)


@pytest.mark.parametrize("value", [{"two": ""}, {"two": 1}, ["two"]])
def test_a_relation_gives_its_reason(folder, value):
    with pytest.raises(ManifestError, match="alters must be a table"):
        make_patch(folder, "one", BLOCK, alters=value)


def test_status_and_check_say_what_is_altered_and_whether_it_is_there(folder, run):
    make_patch(folder, "one", BLOCK, alters={"two": "it counts twice"})
    make_patch(folder, "two", OTHER_BLOCK)
    said = "    alters two (there): it counts twice\n"
    said_without = "    alters two (not there): it counts twice\n"
    assert said_without in run("--check", "--patch", "one")
    assert said in run("--check", "--patch", "one", "--patch", "two")
    assert "alters" not in run("--status")
    run("--apply", "--patch", "one")
    assert said_without in run("--status")
    run("--apply", "--patch", "two")
    assert said in run("--status")
    assert said in run("--check", "--patch", "one")
    assert "  alters two: it counts twice\n" in run("--list")


def test_what_is_altered_or_used_need_not_be_there(folder, tree):
    made = make_patch(folder, "one", BLOCK, alters={"two": "a"}, uses={"three": "b"})
    apply(tree, [made])
    assert status(tree, [made])["one"].state == "applied"
