# SPDX-License-Identifier: Apache-2.0
"""Zero fuzz: what does not fit exactly is refused, and the tree stays as it was."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import PathDistribution
from itertools import cycle
from pathlib import Path

import pytest

from kvtax.patcher import (
    AnchorError,
    CompileError,
    ConflictError,
    DamagedError,
    ParameterError,
    TargetError,
    Tree,
    active_blocks,
    apply,
    check,
    diff,
    find_package,
    load_patch,
    locate,
    revert,
    settle,
    status,
)
from kvtax.patcher.target import LOCK
from tests.patcher.patchlab import (
    FILES,
    FOREIGN,
    block,
    in_child,
    killed_at,
    make_patch,
    make_tree,
    snapshot,
)

SCHEDULE = "Scheduler.schedule"
GOOD = block("before", "", "import os", "x = 1", id="good")


def refused(tree: Tree, error: type, match: str, work) -> None:
    before = snapshot(tree.root)
    with pytest.raises(error, match=match):
        work()
    assert snapshot(tree.root) == before


NEW = {"new.py": b"x = 1\n"}


@pytest.mark.parametrize(
    ("bad", "files", "error", "match"),
    [
        (block("before", SCHEDULE, "missing = 1", "x = 1"), NEW, AnchorError,
         r"^scheduler\.py: anchor 'missing = 1' in scope 'Scheduler\.schedule' "
         r"matches 0 statements.*\(block p:b1\)"),
        (block("before", "Scheduler.gone", "tokens = 0", "x = 1"), NEW, AnchorError,
         r"scheduler\.py: scope 'Scheduler\.gone' not found.*p:b1"),
        (block("before", "", "name = 'bom'", "x = 1", file="v1/bom.py"), NEW,
         AnchorError, "byte order mark"),
        (block("before", "", "import os", "from __future__ import x", id="f"), NEW,
         CompileError, r"scheduler\.py: with p the file would not compile.*line"),
        (block("replace", SCHEDULE, "break", "yield from ()\nawait x"), NEW,
         CompileError, "would not compile"),
        (block("before", "", "x", "y = 1", file="v1/none.py"), NEW, TargetError,
         r"v1/none\.py: no such file in demo 0\.18\.1, needed by block p:b1"),
        (block("before", "", "name = 'caf\xe9'", "y = 'é'", file="v1/latin.py"), NEW,
         TargetError, "must be ASCII"),
        (None, {"new.py": b"return 1\n"}, CompileError, r"new\.py"),
        # A file of the package is never taken over.
        (None, {"v1/core.py": b"x = 1\n"}, ConflictError, r"v1/core\.py"),
    ],
)  # fmt: skip
def test_one_bad_block_or_file_refuses_all(tree, tmp_path, bad, files, error, match):
    blocks = [GOOD, bad] if bad else [GOOD]
    patch = make_patch(tmp_path / "p", "p", blocks, files)
    refused(tree, error, match, lambda: apply(tree, [patch]))
    refused(tree, error, match, lambda: check(tree, [patch]))


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (([], {"new.py": b"x = 2\n"}), r"new\.py: patches one, two"),
        (([block("after", "", "x = 1", "y = 1", file="new.py")],), r"new\.py.*one"),
    ],
)
def test_a_file_that_another_patch_adds_is_neither_added_otherwise_nor_changed(
    tree, tmp_path, second, match
):
    patch = make_patch(tmp_path / "p", "one", [], NEW)
    two = make_patch(tmp_path / "p", "two", *second)
    refused(tree, ConflictError, match, lambda: apply(tree, [patch, two]))
    apply(tree, [patch])
    refused(tree, ConflictError, "one", lambda: apply(tree, [two]))


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
    ],
)
def test_edited_blocks_are_refused(tree, patches, path, old, new, match):
    chosen = [patches["beta"], patches["gamma"]]
    apply(tree, chosen)
    edit(tree.root / path, old, new)
    for work in (apply, check, diff):
        refused(tree, DamagedError, match, lambda w=work: w(tree, chosen))
    refused(tree, DamagedError, match, lambda: revert(tree, ["beta", "gamma"]))


def test_the_refusal_of_an_edited_block_shows_the_edit(tree, patches):
    apply(tree, [patches["beta"]])
    edit(tree.root / "scheduler.py", b"beta_in = 7", b"beta_in = 8")
    shown = (
        r"(?s)block beta:b1 was edited by hand; .*--discard-edits.*\n--- beta:b1 as "
        r"applied\n\+\+\+ scheduler\.py now\n@@.*\n- +beta_in = 7\n\+ +beta_in = 8"
    )
    for work in (
        lambda: apply(tree, [patches["beta"]]),
        lambda: revert(tree, ["beta"], known=patches),
    ):
        refused(tree, DamagedError, shown, work)
    shown = r"(?s)--- no such patch here.*\n\+ +beta_in = 8"
    refused(tree, DamagedError, shown, lambda: revert(tree, ["beta"]))


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("scheduler.py", b"beta_in = 7", b"beta_in = (\n  8)"),
        ("scheduler.py", b"beta_first = 1", b""),
        ("scheduler.py", b"return 200", b"return 300"),
        ("v1/new/deep/more.py", b"x = 1", b"x = 2"),
    ],
)
def test_an_edited_block_goes_on_demand_and_a_copy_stays(tree, patches, path, old, new):
    before = snapshot(tree.root)
    copy = path if path == "scheduler.py" else path.replace("/", ".")
    copies = [tree.root / f"{copy}.edited", tree.root / f"{copy}.edited2"]
    for copy in copies:
        apply(tree, [patches["beta"], patches["gamma"]])
        edit(tree.root / path, old, new)
        text = (tree.root / path).read_bytes()
        revert(tree, ["beta", "gamma"], discard_edits=True)
        assert copy.read_bytes() == text
    for copy in copies:
        copy.unlink()
    assert snapshot(tree.root) == before


def test_revert_leaves_no_file_that_does_not_compile(tree, tmp_path):
    """Somebody's block inside of ours may need our lines around it."""
    loop = block("before", SCHEDULE, "tokens = 0", "while budget < 0:\n    budget += 1")
    apply(tree, [make_patch(tmp_path / "p", "p", [loop])])
    lines = "# BLOCK_BEGIN v1", "break", "# BLOCK_END v1"
    theirs = "".join(f"{' ' * 12}{line}\n" for line in lines).encode()
    inside = b"            budget += 1\n"
    edit(tree.root / "scheduler.py", inside, inside + theirs)
    match = r"scheduler\.py: without p the file would not compile"
    for discard in (False, True):
        refused(tree, CompileError, match, lambda d=discard: revert(tree, ["p"], {}, d))
    # A file that was broken before is no reason to keep ours in it.
    edit(tree.root / "scheduler.py", theirs, b"")
    edit(tree.root / "scheduler.py", b"import os", b"import os os")
    revert(tree, ["p"])
    expected = FILES["scheduler.py"].replace(b"import os", b"import os os")
    assert (tree.root / "scheduler.py").read_bytes() == expected


@pytest.mark.parametrize(
    ("names", "path", "old", "new", "match"),
    [
        # Another patch needs the file.
        (["alpha", "beta"], "v1/new/records.py", b"VALUES", b"OTHER",
         "added by patch alpha.beta"),
        # Lines that were replaced and are lost are never guessed.
        (["gamma"], "scheduler.py", b"# WAS: ", b"# was: ",
         "lost lines that it replaced"),
    ],
)  # fmt: skip
def test_not_every_edit_can_be_discarded(tree, patches, names, path, old, new, match):
    apply(tree, [patches[name] for name in names])
    edit(tree.root / path, old, new)
    work = partial(revert, tree, names[-1:], discard_edits=True)
    refused(tree, DamagedError, match, work)


def test_an_edited_block_of_another_patch_stays_as_it_is(tree, patches):
    apply(tree, [patches["beta"], patches["alpha"]])
    edit(tree.root / "scheduler.py", b"beta_in = 7", b"beta_in = 8")
    revert(tree, ["alpha"])
    text = (tree.root / "scheduler.py").read_bytes()
    assert b"beta_in = 8" in text and b"alpha" not in text
    assert status(tree)["beta"].state == "edited"


def test_a_tree_with_other_line_ends_is_as_good(tree, patches):
    chosen = [patches["alpha"], patches["gamma"]]
    apply(tree, chosen)
    for path in ("scheduler.py", "v1/new/records.py"):
        place = tree.root / path
        place.write_bytes(place.read_bytes().replace(b"\n", b"\r\n"))
    assert status(tree, chosen)["gamma"].state == "applied"
    apply(tree, chosen)
    revert(tree, ["alpha", "gamma"])
    expected = FILES["scheduler.py"].replace(b"\n", b"\r\n")
    assert (tree.root / "scheduler.py").read_bytes() == expected
    assert not (tree.root / "v1/new").exists()


@pytest.mark.parametrize(
    ("path", "old", "new", "match"),
    [
        ("scheduler.py", b"# BLOCK_END beta:b1", b"#", r"scheduler\.py:\d+: .*beta:b1"),
        ("scheduler.py", b"# BLOCK_BEGIN beta:b1", b"#", r"scheduler\.py:\d+: .*beta"),
        ("v1/new/records.py", b"# BLOCK_END", b"# END", r"records\.py:1"),
    ],
)
def test_half_a_block_of_ours_is_refused_with_its_line(
    tree, patches, path, old, new, match
):
    chosen = [patches["beta"], patches["delta"]]
    apply(tree, chosen)
    edit(tree.root / path, old, new)
    refused(tree, DamagedError, match, lambda: apply(tree, chosen))
    refused(tree, DamagedError, match, lambda: revert(tree, ["beta", "delta"]))
    refused(tree, DamagedError, match, lambda: revert(tree, ["beta"], patches, True))
    damaged: list[str] = []
    assert status(tree, chosen, damaged)["delta"].state != "not applied"
    assert len(damaged) == 1 and re.search(match, damaged[0])


V1 = """{begin}
{indent}import time as _v1
{indent}{end}"""


def foreign_patch(text: bytes, foreign: tuple[str, str], anchor: bytes) -> bytes:
    """Put a foreign block above the line that holds the anchor."""
    lines = text.split(b"\n")
    at = next(number for number, line in enumerate(lines) if anchor in line)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())].decode()
    block = V1.format(begin=foreign[0], end=foreign[1], indent=indent)
    lines.insert(at, (indent + block).encode())
    return b"\n".join(lines)


ANCHORS = cycle([b"tokens = 0", b"return tokens", b"import os"])


@pytest.mark.parametrize(
    ("foreign", "anchor"), list(zip(FOREIGN, ANCHORS, strict=False))
)
def test_a_foreign_patch_survives_whatever_comes_and_goes(
    tree, patches, foreign, anchor
):
    names = ["alpha", "beta", "delta"]
    chosen = [patches[name] for name in names]
    place, other = tree.root / "scheduler.py", tree.root / "other.py"
    other.write_text("\n".join(foreign) + "\n")
    place.write_bytes(foreign_patch(place.read_bytes(), foreign, anchor))
    before = snapshot(tree.root)
    apply(tree, chosen)
    assert apply(tree, chosen).changes == ()
    assert {status(tree, chosen)[name].state for name in names} == {"applied"}
    revert(tree, names)
    assert snapshot(tree.root) == before
    # It may come after ours as well, and ours goes first.
    place.write_bytes(FILES["scheduler.py"])
    apply(tree, chosen)
    place.write_bytes(foreign_patch(place.read_bytes(), foreign, anchor))
    # Between a block and its statement, the block is not where it belongs.
    for state in ({"applied", "outdated"}, {"applied"}):
        assert {status(tree, chosen)[name].state for name in names} <= state
        apply(tree, chosen)
    revert(tree, names, patches, discard_edits=True)
    assert snapshot(tree.root) == before


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


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tree, patches):
    os.mkfifo(tree.root / LOCK)
    check(tree, [patches["alpha"]])
    with pytest.raises(TargetError, match="was not made by this user's call"):
        apply(tree, [patches["alpha"]])
    (tree.root / LOCK).unlink()
    (tree.root / "scheduler.py").unlink()
    os.mkfifo(tree.root / "scheduler.py")
    with pytest.raises(TargetError, match="is no regular file"):
        apply(tree, [patches["alpha"]])


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


VERSIONS = ["0.18.1", "0.19.0", "0.29.0rc1", "0.34.0.dev7+gabc", "0.1.dev9", "dev"]


def versioned(parent: Path, version: str, files=FILES) -> Tree:
    text = f"__version__ = version = '{version}'\n".encode()
    return make_tree(parent, files | {"_version.py": text})


@pytest.mark.parametrize("version", VERSIONS)
def test_the_code_picks_the_form_of_a_block_whatever_the_version(tmp_path, version):
    os_import = {"anchor": "import os", "where": "after", "id": "b"}
    given = {"scope": "", "anchor": "def limit():"}
    forms = [
        os_import | {"code": "form = 1", "given": given | {"anchor": "def top():"}},
        os_import | {"code": "form = 2", "given": given},
        os_import | {"code": "form = 3", "anchor": "import sys"},
        os_import | {"code": "form = 4", "file": "other.py"},
    ]
    patch = make_patch(tmp_path / "p", "p", forms)
    text = FILES["scheduler.py"]
    for number, (old, new, form) in enumerate(
        [
            (b"def limit():", b"def top():", 1),
            (b"", b"", 2),
            (b"import os", b"import sys", 3),
        ]
    ):
        files = FILES | {"scheduler.py": text.replace(old, new)}
        tree = versioned(tmp_path / str(number), version, files)
        apply(tree, [patch])
        assert f"form = {form}\n" in (tree.root / "scheduler.py").read_text()
        assert check(tree, [patch]).changes == ()
        revert(tree, ["p"])
        assert (tree.root / "scheduler.py").read_bytes() == files["scheduler.py"]
    (tree.root / "scheduler.py").write_text("import re\n")
    match = r"^0 of 4 forms of block p:b fit demo .*scheduler.py: .*other.py: no such"
    refused(tree, AnchorError, match, lambda: apply(tree, [patch]))
    (tree.root / "scheduler.py").write_bytes(b"import sys\n" + text)
    refused(tree, AnchorError, "^2 of 4 forms", lambda: apply(tree, [patch]))


def test_optional_blocks_come_all_or_not_at_all(tree, tmp_path):
    parts = [
        GOOD | {"optional": "both", "id": "one"},
        block("after", SCHEDULE, "tokens = 0", "y = 1", optional="both", id="two"),
        block("after", "", "def limit():", "z = 1", optional="alone", id="three"),
    ]
    patch = make_patch(tmp_path / "p", "p", parts)

    def ids() -> list[str]:
        return [spec.id for spec in active_blocks(tree, patch)]

    assert ids() == ["one", "two", "three"]
    edit(tree.root / "scheduler.py", b"tokens = 0", b"tokens = 1")
    assert ids() == ["three"]
    apply(tree, [patch])
    assert status(tree, [patch])["p"].state == "applied"
    revert(tree, ["p"])
    edit(tree.root / "scheduler.py", b"def limit", b"def top")
    match = "p has no block for demo 0.18.1"
    refused(tree, TargetError, match, lambda: apply(tree, [patch]))


@pytest.mark.parametrize(
    ("version", "since", "before_version", "needed"),
    [
        # A build that knows no tag counts as newer than all.
        *((v, "0.32.0", None, True) for v in ("0.1.dev1+gabc", "0.0.0", "dev", "0.40")),
        *((v, None, "0.33", False) for v in ("0.1.dev1+gabc", "0.0.0", "dev", "0.40")),
        ("0.17.9", "0.18", "0.19.1", False),
        ("0.18.0rc1", "0.18", "0.19.1", True),
        ("0.19.0", "0.18", "0.19.1", True),
        ("0.19.1+x", "0.18", "0.19.1", False),
    ],
)
def test_a_patch_is_refused_where_the_package_needs_none(
    tmp_path, version, since, before_version, needed
):
    given = {"since": since, "before_version": before_version}
    ranges = {key: value for key, value in given.items() if value}
    patch = make_patch(tmp_path / "p", "p", [GOOD], **ranges)
    tree = versioned(tmp_path, version)
    if needed:
        assert apply(tree, [patch]).changes
    else:
        since = f"from {since} on and " if since else ""
        match = f"p is needed {since}before {before_version} only, and this is demo "
        match = re.escape(match + version)
        refused(tree, TargetError, match, lambda: apply(tree, [patch]))


def test_a_version_is_needed_for_a_patch_with_a_range_alone(tmp_path):
    files = {path: text for path, text in FILES.items() if path != "_version.py"}
    tree = make_tree(tmp_path, files)
    assert tree.version is None
    ranged = make_patch(tmp_path / "p", "ranged", [GOOD], since="0.18")
    match = "depends on the version"
    refused(tree, TargetError, match, lambda: apply(tree, [ranged]))
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
    code = "from kvtax import patcher; print(patcher.find_package('loud_demo'))"
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


def test_a_package_in_an_archive_is_refused_and_no_other_taken(tmp_path, monkeypatch):
    other = make_tree(tmp_path / "other", name="zipped_demo")
    archive = shutil.make_archive(str(tmp_path / "z"), "zip", other.root.parent)
    monkeypatch.syspath_prepend(archive)
    with pytest.raises(TargetError, match=r"z\.zip/zipped_demo/__init__\.py, without"):
        find_package("zipped_demo", [other.root.parent])


MAP = b"""class Map:
    def __init__(self):
        self._cache = {}

    def insert(self, key, block):
        self._cache[key] = block


class Pool:
    def __init__(self):
        self.cached = Map()
"""


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("map.py", "\n    def many(self, m):\n        self.cached._cache |= m", "many"),
        ("map.py", "\n\ndef f(m, k):\n    del m._cache[k]", "map.py:15: f uses"),
        ("map.py", "\n\nvars(Map())['_cache'] = {}", "the module uses _cache"),
        ("map.py", "\n    def reset(self):\n        self.cached = 1", "Pool.reset m"),
        ("more.py", "def f(pool):\n    pool.cached._cache.clear()", "more.py:2: f u"),
        ("more.py", "def f(pool):\n    pool.cached = {}", "more.py:2: f may change"),
        ("more.py", "def f(pool, k):\n    pool.cached[k] = 1", "f may change cached"),
        ("more.py", "def f(pool):\n    pool.cached.many()", "f may change cached"),
        ("more.py", "def f(pool):\n    m = pool.cached", "f may change cached"),
        ("map.py", "\n\nclass Other(Map):\n    pass", "Other uses Map"),
    ],
)
def test_a_use_that_a_patch_does_not_know_is_refused(tree, tmp_path, path, more, said):
    insert = block("after", "Map.insert", "self._cache[key] = block", "print(1)")
    inside = "map.py:Map"
    patch = make_patch(tmp_path / "p", "seer", [insert | {"file": "map.py"}])
    manifest = tmp_path / "p" / "seer" / "patch.toml"
    with manifest.open("a") as file:
        file.write(
            '[[only]]\nname = "_cache"\nwithin = "cached"\nwhy = "unseen"\n'
            f'uses = {{ "{inside}.__init__" = 1, "{inside}.insert" = 1 }}\n'
            '[[only]]\nname = "cached"\nmethods = ["get"]\nwhy = "unseen"\n'
            'uses = { "map.py:Pool.__init__" = 1 }\n'
            '[[only]]\nname = "Map"\nwhy = "unseen"\n'
            'uses = { "map.py:Pool.__init__" = 1 }\n'
        )
    patch = load_patch(manifest.parent)
    (tree.root / "map.py").write_bytes(MAP)
    # Reading what the map holds is no matter of the patch.
    (tree.root / "reader.py").write_bytes(
        b"def f(pool):\n    return len(pool.cached), pool.cached.get(1)\n"
    )
    before = snapshot(tree.root)
    apply(tree, [patch])
    assert apply(tree, [patch]).changes == ()
    revert(tree, ["seer"])
    assert snapshot(tree.root) == before
    with (tree.root / path).open("a") as file:
        file.write(f"{more}\n")
    refused(tree, TargetError, said, lambda: check(tree, [patch]))
    assert "unseen" in status(tree, [patch])["seer"].misfit


def test_a_source_that_is_missing_is_the_reason(tree, patches):
    (tree.root / "scheduler.py").rename(tree.root / "scheduler.pyc")
    match = r"scheduler\.py is there as bytecode only; install demo with its source"
    refused(tree, TargetError, match, lambda: apply(tree, [patches["beta"]]))


@pytest.mark.slow
@pytest.mark.parametrize("eol", ["\n", "\r\n"])
def test_an_uninstall_removes_what_patches_added(tree, patches, eol):
    """Installers remove the files of the RECORD, and their folders."""
    site = tree.root.parent
    record = site / "demo_cpu-0.18.1.dist-info" / "RECORD"
    record.parent.mkdir()
    paths = [*(f"demo/{path},sha256=x,1" for path in FILES), f"{record.parent.name},,"]
    record.write_text("".join(f"{path}{eol}" for path in paths), newline="")
    (site / "a-1.dist-info").mkdir()
    (site / "a-1.dist-info" / "RECORD").write_text("a/demo/__init__.py,sha256=x,1\n")
    before = snapshot(site)

    def listed() -> set[str]:
        files = PathDistribution(record.parent).files
        return {str(file.relative_to("demo")) for file in files if "demo" in file.parts}

    def there() -> set[str]:
        paths = tree.root.rglob("*.py")
        return {str(path.relative_to(tree.root)) for path in paths}

    apply(tree, patches.values())
    assert listed() == there() > set(FILES)
    whole = record.read_bytes()
    assert apply(Tree(tree.root), patches.values()).changes == ()
    # Another patch has the file as well.
    revert(tree, ["alpha"])
    assert listed() == there()
    apply(tree, [patches["alpha"]])
    assert record.read_bytes() == whole
    revert(tree, patches)
    assert snapshot(site) == before
    for number in range(5, 60, 9):
        killed_at(number, lambda: apply(tree, patches.values()))
        settle(tree)
        assert listed() == there()
        revert(tree, patches)
        assert snapshot(site) == before


def test_what_an_uninstall_leaves_of_ours_can_be_taken_out(tree, patches, monkeypatch):
    """As of a package without a RECORD that could be written."""
    apply(tree, patches.values())
    for path in FILES:
        (tree.root / path).unlink()
    (tree.root / "v1" / "new" / "__pycache__").mkdir()
    monkeypatch.syspath_prepend(tree.root.parent)
    assert locate("demo", tree.root.parent).root == tree.root
    assert find_package("demo") == tree.root
    (tree.root / "v1" / "own.py").write_text("")
    with pytest.raises(TargetError):
        Tree(tree.root)
    (tree.root / "v1" / "own.py").unlink()
    left = Tree(tree.root)
    assert status(left)["alpha"].state == "applied"
    revert(left, patches)
    assert not tree.root.exists()
