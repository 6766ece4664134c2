# SPDX-License-Identifier: Apache-2.0
"""A patch folder is checked when it is read, field by field."""

import re

import pytest
from patchlab import block, make_patch

from blockpatch import ManifestError, load_patches, load_sets, patch_hash

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
    assert made.is_tested("0.18.1") and made.is_tested("0.18.1+cpu")
    assert not made.is_tested("0.18.10") and not made.is_tested(None)


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
        ({"anchor": "if x:\n    pass"}, "header alone"),
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
        ({"since": "new"}, "not a version"),
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
        ({"tested": "0.18.1"}, "list of versions"),
        ({"tested": [0.18]}, "list of versions"),
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
    ("first", "second", "meet"),
    [
        ({}, {}, True),
        ({"since": "0.2"}, {}, True),
        ({"before_version": "0.3"}, {"since": "0.2"}, True),
        ({"before_version": "0.3.0"}, {"since": "0.3"}, False),
        ({"since": "0.10"}, {"before_version": "0.9"}, False),
    ],
)
def test_variants_of_a_block_must_not_meet_in_any_release(
    tmp_path, first, second, meet
):
    variants = [GOOD | {"id": "x"} | first, GOOD | {"id": "x"} | second]
    if meet:
        with pytest.raises(ManifestError, match="two variants"):
            make_patch(tmp_path, "p", variants)
    else:
        assert len(make_patch(tmp_path, "p", variants).blocks) == 2


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
    (tmp_path / "sets.toml").write_text('both = ["v1", "v2"]\n')
    assert load_sets(tmp_path) == {"both": ["v1", "v2"]}
