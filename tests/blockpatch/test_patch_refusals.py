# SPDX-License-Identifier: Apache-2.0
"""Zero fuzz: what does not fit exactly is refused, and the tree stays as it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patchlab import FILES, block, in_child, make_patch, make_tree, snapshot

from blockpatch import (
    AnchorError,
    BlockPatchError,
    CompileError,
    ConflictError,
    DamagedError,
    ParameterError,
    TargetError,
    Tree,
    apply,
    check,
    find_package,
    locate,
    revert,
    status,
)

SCHEDULE = "Scheduler.schedule"
GOOD = block("before", "", "import os", "x = 1", id="good")


def refused(tree: Tree, error: type, match: str, work) -> None:
    before = snapshot(tree.root)
    with pytest.raises(error, match=match):
        work()
    assert snapshot(tree.root) == before


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (
            block("before", SCHEDULE, "missing = 1", "x = 1"),
            AnchorError,
            r"^scheduler\.py: anchor 'missing = 1' in scope 'Scheduler\.schedule' "
            r"matches 0 statements.*\(block p:b1\)",
        ),
        (
            block("before", "Scheduler.gone", "tokens = 0", "x = 1"),
            AnchorError,
            r"scheduler\.py: scope 'Scheduler\.gone' not found.*p:b1",
        ),
        (
            block("before", "", "name = 'bom'", "x = 1", file="v1/bom.py"),
            AnchorError,
            "byte order mark",
        ),
        (
            block("before", "", "import os", "from __future__ import x", id="f"),
            CompileError,
            r"scheduler\.py: with p the file would not compile.*line",
        ),
        (
            block("replace", SCHEDULE, "break", "yield from ()\nawait x"),
            CompileError,
            "would not compile",
        ),
        (
            block("before", "", "x", "y = 1", file="v1/none.py"),
            TargetError,
            r"v1/none\.py: no such file in demo 0\.18\.1, needed by block p:b1",
        ),
        (
            block("before", "", "name = 'caf\xe9'", "y = 'é'", file="v1/latin.py"),
            TargetError,
            "must be ASCII",
        ),
    ],
)
def test_one_bad_block_refuses_all(tree, tmp_path, bad, error, match):
    patch = make_patch(tmp_path / "p", "p", [GOOD, bad], {"new.py": b"x = 1\n"})
    refused(tree, error, match, lambda: apply(tree, [patch]))
    refused(tree, error, match, lambda: check(tree, [patch]))


def test_an_added_file_that_does_not_compile_is_refused(tree, tmp_path):
    patch = make_patch(tmp_path / "p", "p", [GOOD], {"new.py": b"return 1\n"})
    refused(tree, CompileError, r"new\.py", lambda: apply(tree, [patch]))


def test_a_file_of_the_package_is_never_taken_over(tree, tmp_path):
    patch = make_patch(tmp_path / "p", "p", [GOOD], {"v1/core.py": b"x = 1\n"})
    refused(tree, ConflictError, r"v1/core\.py", lambda: apply(tree, [patch]))


def test_two_patches_that_add_different_files_at_one_path_are_refused(tree, tmp_path):
    one = make_patch(tmp_path / "p", "one", [], {"new.py": b"x = 1\n"})
    two = make_patch(tmp_path / "p", "two", [], {"new.py": b"x = 2\n"})
    match = r"new\.py: patches one, two"
    refused(tree, ConflictError, match, lambda: apply(tree, [one, two]))
    apply(tree, [one])
    refused(tree, ConflictError, match, lambda: apply(tree, [two]))


def test_a_block_in_a_file_that_another_patch_adds_is_refused(tree, tmp_path):
    adder = make_patch(tmp_path / "p", "adder", [], {"new.py": b"x = 1\n"})
    inside = block("after", "", "x = 1", "y = 1", file="new.py")
    user = make_patch(tmp_path / "p", "user", [inside])
    match = r"new\.py"
    refused(tree, ConflictError, match, lambda: apply(tree, [adder, user]))
    apply(tree, [adder])
    refused(tree, ConflictError, "adder", lambda: apply(tree, [user]))


def edit(path: Path, old: bytes, new: bytes) -> None:
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("path", "old", "new", "match"),
    [
        ("scheduler.py", b"beta_in = 7", b"beta_in = 8", "beta:b1 was edited by hand"),
        ("scheduler.py", b"# WAS: ", b"# was: ", "gamma:b. was edited by hand"),
        ("v1/new/records.py", b"VALUES", b"OTHER", "edited by hand"),
        ("scheduler.py", b"# BLOCK_END beta:b1", b"#", r"scheduler\.py:\d+: .*beta:b1"),
        ("scheduler.py", b"# BLOCK_BEGIN beta:b1", b"#", r"scheduler\.py:\d+: .*beta"),
        ("v1/new/records.py", b"# BLOCK_END", b"# END", r"records\.py:1"),
    ],
)
def test_edited_or_damaged_blocks_are_refused(tree, patches, path, old, new, match):
    chosen = [patches["beta"], patches["gamma"]]
    apply(tree, chosen)
    edit(tree.root / path, old, new)
    refused(tree, DamagedError, match, lambda: apply(tree, chosen))
    refused(tree, DamagedError, match, lambda: revert(tree, ["beta", "gamma"]))


def test_a_damaged_file_elsewhere_refuses_too(tree, patches):
    (tree.root / "other.py").write_text("# BLOCK_END beta:b1\n")
    refused(tree, DamagedError, r"other\.py:1", lambda: apply(tree, patches.values()))
    refused(tree, DamagedError, r"other\.py:1", lambda: status(tree))


def test_edits_outside_the_blocks_are_kept(tree, patches):
    apply(tree, [patches["gamma"]])
    edit(tree.root / "scheduler.py", b"tokens = 0", b"tokens = 5")
    revert(tree, ["gamma"])
    now = (tree.root / "scheduler.py").read_bytes()
    assert now == FILES["scheduler.py"].replace(b"tokens = 0", b"tokens = 5")


def test_a_file_behind_a_symbolic_link_is_refused(tree, patches, tmp_path):
    elsewhere = tmp_path / "scheduler.py"
    os.rename(tree.root / "scheduler.py", elsewhere)
    (tree.root / "scheduler.py").symlink_to(elsewhere)
    match = r"scheduler\.py is a symbolic link"
    refused(tree, TargetError, match, lambda: apply(tree, [patches["alpha"]]))
    assert (tree.root / "scheduler.py").is_symlink()
    os.rename(tree.root / "v1", tmp_path / "v1")
    (tree.root / "v1").symlink_to(tmp_path / "v1")
    patch = make_patch(tmp_path / "p", "p", [], {"v1/sub/new.py": b""})
    refused(tree, TargetError, "symbolic link", lambda: apply(tree, [patch]))


@pytest.mark.parametrize("folder", [".", "v1"])
def test_a_read_only_tree_is_refused(tree, patches, folder):
    place = tree.root / folder
    place.chmod(0o555)
    try:
        match = "is read-only"
        refused(tree, TargetError, match, lambda: apply(tree, [patches["beta"]]))
        assert status(tree, patches.values())["beta"].state == "not applied"
    finally:
        place.chmod(0o755)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_tree_of_another_user_is_refused(patches, memory_folder):
    tree = make_tree(memory_folder / "foreign")
    memory_folder.chmod(0o755)

    def as_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(TargetError, match="is read-only"):
            apply(tree, patches.values())
        assert status(tree) == {}

    before = snapshot(tree.root)
    assert in_child(as_nobody) == 0
    assert snapshot(tree.root) == before


def test_a_patch_for_another_package_is_refused(tree, tmp_path):
    patch = make_patch(tmp_path / "p", "p", [GOOD], package="other")
    match = "for package other, not demo"
    refused(tree, TargetError, match, lambda: apply(tree, [patch]))


def test_unknown_parameters_and_values_that_are_no_literals_are_refused(tree, patches):
    beta = [patches["beta"]]
    for values, match in [
        ({"NONE": 1}, "'NONE' is not known"),
        ({"LIMIT": object()}, "not a plain literal"),
        ({"LIMIT": float("nan")}, "not a plain literal"),
    ]:
        refused(tree, ParameterError, match, lambda v=values: apply(tree, beta, v))


def test_the_version_picks_the_variant(tmp_path):
    spec = {"anchor": "import os", "where": "after", "id": "b"}
    variants = [
        spec | {"code": "variant = 1", "before_version": "0.20.0"},
        spec | {"code": "variant = 2", "since": "0.20", "before_version": "0.30.0"},
        spec | {"code": "variant = 3", "since": "0.31.0"},
    ]
    patch = make_patch(tmp_path / "p", "p", variants)
    for number, (version, variant) in enumerate(
        [("0.18.1", 1), ("0.20.0rc1", 2), ("0.29.9+cpu", 2), ("0.31", 3), ("1.0", 3)]
    ):
        text = f"__version__ = version = '{version}'\n".encode()
        tree = make_tree(tmp_path / str(number), FILES | {"_version.py": text})
        apply(tree, [patch])
        assert f"variant = {variant}\n" in (tree.root / "scheduler.py").read_text()
    (tree.root / "_version.py").write_text("version = '0.30.2'\n")
    match = r"no block for demo 0\.30\.2; tested with 0\.18\.1"
    refused(tree, TargetError, match, lambda: apply(Tree(tree.root), [patch]))
    (tree.root / "_version.py").unlink()
    bare = Tree(tree.root)
    refused(bare, TargetError, "depends on the version", lambda: apply(bare, [patch]))


def test_a_patch_is_refused_where_the_package_needs_none(tmp_path):
    patch = make_patch(
        tmp_path / "p", "p", [GOOD], since="0.18", before_version="0.19.1"
    )
    for number, (version, needed) in enumerate(
        [("0.17.9", False), ("0.18.0rc1", True), ("0.19.0", True), ("0.19.1+x", False)]
    ):
        text = f"version = '{version}'\n".encode()
        tree = make_tree(tmp_path / str(number), FILES | {"_version.py": text})
        if needed:
            assert apply(tree, [patch]).changes
        else:
            match = r"p is needed from 0\.18 on and before 0\.19\.1 only, and this is "
            match += re.escape(f"demo {version}")
            refused(tree, TargetError, match, lambda t=tree: apply(t, [patch]))
    (tree.root / "_version.py").unlink()
    bare = Tree(tree.root)
    refused(bare, TargetError, "depends on the version", lambda: apply(bare, [patch]))


def test_a_patch_without_ranges_needs_no_version(tmp_path):
    files = {path: text for path, text in FILES.items() if path != "_version.py"}
    tree = make_tree(tmp_path, files)
    assert tree.version is None
    assert apply(tree, [make_patch(tmp_path / "p", "p", [GOOD])]).changes


def test_version_comes_from_metadata_where_the_package_has_none(tmp_path):
    tree = make_tree(tmp_path, {"__init__.py": b""}, "nixl_cu12")
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nVersion: 1.4\n")
    assert Tree(tree.root).version == "1.4"
    info = tmp_path / "nixl_cu12-1.5.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nVersion: 1.5.1\n")
    assert Tree(tree.root).version == "1.5.1"


def test_the_target_may_be_the_package_its_parent_or_a_source_tree(tmp_path):
    root = make_tree(tmp_path / "a" / "src").root
    for target in (root, root.parent, root.parent.parent):
        assert locate("demo", target).root == root
    with pytest.raises(TargetError, match=r"no package 'demo' at"):
        locate("demo", tmp_path)
    with pytest.raises(TargetError, match="not a package directory"):
        Tree(tmp_path)


def test_a_package_is_found_without_being_imported(tmp_path):
    make_tree(tmp_path, {"__init__.py": b"raise SystemExit('imported')"}, "loud_demo")
    code = "import blockpatch as b; print(b.find_package('loud_demo'))"
    path = [str(tmp_path), str(Path(__file__).resolve().parents[2])]
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert out.stdout == f"{tmp_path / 'loud_demo'}\n", out.stderr
    with pytest.raises(TargetError, match="no package 'not_there_x'"):
        find_package("not_there_x", [tmp_path])
    assert find_package("loud_demo", [tmp_path]) == tmp_path / "loud_demo"


def test_every_refusal_derives_from_one_class():
    errors = [AnchorError, CompileError, ConflictError, DamagedError, TargetError]
    assert all(issubclass(error, BlockPatchError) for error in errors)
