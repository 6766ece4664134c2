# SPDX-License-Identifier: Apache-2.0
"""A manifest is checked field by field, also its relations to other patches."""

from __future__ import annotations

import re

import pytest

from kvtax.patcher import (
    ConflictError,
    ManifestError,
    apply,
    load_patches,
    load_sets,
    patch_hash,
    revert,
    status,
)
from kvtax.patcher.cli import main
from tests.patcher.patchlab import block, make_patch, snapshot

GOOD = block("before", "", "import os", "x = 1")


def test_a_good_manifest_is_read_whole(tmp_path):
    made = make_patch(
        tmp_path,
        "good",
        [block("after", "A.b", "if x:", "\n  a = @N@\n    \n  b = 'é'\n")],
        {"v1/new.py": b"x = 1\n"},
        parameters={"N": "text"},
    )
    assert load_patches(tmp_path) == {"good": made}
    assert made.blocks[0].code == "a = @N@\n\nb = 'é'\n"
    assert made.files == {"v1/new.py": b"x = 1\n"}


def around(**changes):
    entry = {key: value for key, value in GOOD.items() if key != "code"}
    return entry | {"where": "around", "before": "x = 1", "after": "y = 2"} | changes


def test_a_block_around_its_anchor_is_one_before_and_one_after(tmp_path):
    made = make_patch(tmp_path, "pair", [around(id="timed")])
    assert [(b.id, b.where, b.code) for b in made.blocks] == [
        ("timed_begin", "before", "x = 1\n"),
        ("timed_end", "after", "y = 2\n"),
    ]


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (around(code="z = 3"), "no code"),
        ({k: v for k, v in around().items() if k != "after"}, "'after' is missing"),
        (around(before="x = ("), "not valid Python"),
    ],
)
def test_half_a_block_around_is_refused(tmp_path, entry, match):
    with pytest.raises(ManifestError, match=match):
        make_patch(tmp_path, "bad", [entry])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"where": "above"}, "where is 'above'"),
        ({"anchor": "a = 1\nif b:"}, "no Python statement"),
        ({"code": "x = ("}, "code is not valid Python"),
        ({"code": "  \n"}, "code is empty"),
        ({"code": "# BLOCK_END x:y"}, "no sentinel"),
        ({"code": "x = '''a\nb'''"}, "over several lines"),
        ({"code": "x = f'''a{1}\nb'''"}, "over several lines"),
        ({"code": "x = @MISSING@"}, r"@MISSING@ is not among the \[parameters\]"),
        ({"file": "../x.py"}, "inside the package"),
        ({"file": "/x.py"}, "inside the package"),
        ({"file": "x.txt"}, r"\.py path"),
        ({"id": "a b"}, "not a name"),
        ({"optional": "a b"}, "not a name"),
        ({"given": {"scope": ""}}, "'anchor' is missing"),
        ({"given": {"anchor": "x = ("}}, "no Python statement"),
        ({"given": {"anchor": "x", "file": "../x.py"}}, "inside the package"),
        ({"typo": "x"}, "'typo' is not known"),
        ({"scope": 3}, "must be a string"),
    ],
)
def test_a_bad_block_is_refused_by_name(tmp_path, change, match):
    with pytest.raises(ManifestError, match=match) as refusal:
        make_patch(tmp_path, "bad", [GOOD, GOOD | {"id": "b9"} | change])
    assert "bad/patch.toml" in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": "other"}, "must equal its folder"),
        ({"package": 3}, "not a name"),
        ({"extra": 1}, "'extra' is not known"),
    ],
)
def test_a_bad_field_is_refused(tmp_path, fields, match):
    with pytest.raises(ManifestError, match=match):
        make_patch(tmp_path, "bad", [GOOD], **fields)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ManifestError, match="neither a block nor a file"):
        make_patch(tmp_path, "empty")
    for content in (b"x = 1\r\n", b"x = 1", b"\xff\n", b"# BLOCK_END a:b\n"):
        with pytest.raises(ManifestError, match="file source"):
            make_patch(tmp_path, "bad", [], {"new.py": content})
    manifest = tmp_path / "bad" / "patch.toml"
    for text, match in [
        ("name = ", "patch.toml"),
        ("since = 0.2\n" + manifest.read_text(), "0.2 must be a string"),
        ("name = 'bad'", "'package' is missing"),
        (manifest.read_text().replace("source0", "gone"), "file source"),
        (manifest.read_text().replace("[[file]]", "[file]"), "list of tables"),
    ]:
        manifest.write_text(text)
        with pytest.raises(ManifestError, match=re.escape(match)):
            load_patches(tmp_path)


@pytest.mark.parametrize(
    ("second", "match"),
    [
        ({}, "two forms for the same code"),
        ({"code": "x = 2"}, "two forms for the same code"),
        ({"anchor": "import sys", "optional": "o"}, "differ in 'optional'"),
        ({"anchor": "import sys"}, None),
        ({"given": {"anchor": "import sys"}}, None),
    ],
)
def test_forms_of_a_block_are_for_different_code(tmp_path, second, match):
    forms = [GOOD | {"id": "x"}, GOOD | {"id": "x"} | second]
    if match:
        with pytest.raises(ManifestError, match=match):
            make_patch(tmp_path, "p", forms)
    else:
        assert len(make_patch(tmp_path, "p", forms).blocks) == 2


def test_the_hash_covers_manifest_and_sources_and_nothing_else(tmp_path):
    def made(folder, code="x = 1", content=b"y = 1\n"):
        block_ = GOOD | {"code": code}
        return patch_hash(
            make_patch(tmp_path / folder, "p", [block_], {"n.py": content})
        )

    first = made("a")
    (tmp_path / "b" / "p").mkdir(parents=True)
    (tmp_path / "b" / "p" / "README.md").write_text("notes")
    assert made("b") == first
    assert len({first, made("c", code="x = 2"), made("d", content=b"")}) == 3


def test_sets_are_read_from_their_file(tmp_path):
    assert load_sets(tmp_path) == {}
    (tmp_path / "sets.toml").write_text('both = ["v1", "v2"]\nall = ["both", "v0"]\n')
    assert load_sets(tmp_path) == {"both": ["v1", "v2"], "all": ["v1", "v2", "v0"]}


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
    (folder.parent / "configs").mkdir()
    (folder.parent / "configs" / "releases.toml").write_text("")

    def call(*argv: str) -> str:
        assert main(None, folder.parent, [*argv, "--target", str(tree.root)]) == 0
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


@pytest.mark.parametrize("kind", ["uses", "conflicts"])
@pytest.mark.parametrize("other", ["missing", "one"])
def test_a_relation_names_another_patch_that_is_there(folder, kind, other):
    make_patch(folder, "one", BLOCK, **{kind: {other: "why"}})
    with pytest.raises(ManifestError, match=rf"one/patch.toml: {kind}\.{other}"):
        load_patches(folder)


@pytest.mark.parametrize("value", [{"two": ""}, {"two": 1}, ["two"]])
def test_a_relation_gives_its_reason(folder, value):
    with pytest.raises(ManifestError, match="uses must be a table"):
        make_patch(folder, "one", BLOCK, uses=value)


def test_status_and_check_say_what_is_used_and_whether_it_is_there(folder, run):
    make_patch(folder, "one", BLOCK, uses={"two": "it counts twice"})
    make_patch(folder, "two", OTHER_BLOCK)
    said = "    uses two (there): it counts twice\n"
    said_without = "    uses two (not there): it counts twice\n"
    assert said_without in run("--check", "--patch", "one")
    assert said in run("--check", "--patch", "one", "--patch", "two")
    assert "uses" not in run("--status")
    run("--apply", "--patch", "one")
    assert said_without in run("--status")
    run("--apply", "--patch", "two")
    assert said in run("--status")
    assert said in run("--check", "--patch", "one")
    assert "  uses two: it counts twice\n" in run("--list")


def test_what_is_used_need_not_be_there(folder, tree):
    made = make_patch(folder, "one", BLOCK, uses={"two": "a", "three": "b"})
    apply(tree, [made])
    assert status(tree, [made])["one"].state == "applied"
