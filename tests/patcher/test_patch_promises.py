# SPDX-License-Identifier: Apache-2.0
"""The promises: patches come and go in any order, and leave no trace."""

import itertools
import json
import os
import py_compile
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtax.patcher import Tree, apply, check, diff, patch_hash, pending, revert, status
from kvtax.patcher.errors import ConflictError, TargetError, WriteError
from tests.patcher.patchlab import (
    RECORDS,
    block,
    in_child,
    make_patch,
    make_patches,
    make_tree,
    run_python,
    snapshot,
)

# epsilon and alpha meet at one anchor; gamma's replace of the return statement has
# delta's after-block at its end; all five fit together.
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


@pytest.fixture(scope="module")
def lab(memory_folder):
    """A tree, its patches, and the snapshot that every set of patches must give."""
    folder = memory_folder
    tree, patches = make_tree(folder / "site"), make_patches(folder / "patches")
    expected = {frozenset(): snapshot(tree.root)}
    for count in range(1, len(NAMES) + 1):
        for names in itertools.combinations(NAMES, count):
            apply(tree, [patches[name] for name in names])
            expected[frozenset(names)] = snapshot(tree.root)
            revert(tree, names)
            assert snapshot(tree.root) == expected[frozenset()]
    assert len({str(sorted(shot.items())) for shot in expected.values()}) == 32
    return tree, patches, expected


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        ),
        max_size=8,
    )
)
def test_the_tree_depends_only_on_which_patches_are_in_it(lab, calls):
    tree, patches, expected = lab
    there: set[str] = set()
    try:
        for applying, names in calls:
            if applying:
                apply(tree, [patches[name] for name in names])
                there |= set(names)
            else:
                revert(tree, names)
                there -= set(names)
            assert snapshot(tree.root) == expected[frozenset(there)]
            applied = {n for n, s in status(tree).items() if s.state == "applied"}
            assert applied == there
    finally:
        revert(tree, NAMES)
    assert snapshot(tree.root) == expected[frozenset()]


def test_applying_again_or_reverting_again_changes_nothing(tree, patches):
    both = [patches["alpha"], patches["beta"]]
    assert apply(tree, both).changes

    def touched():
        files = {path: path.stat() for path in tree.root.rglob("*")}
        return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in files.items()}

    stamps = touched()
    assert apply(tree, both).changes == ()
    assert apply(tree, both[:1]).changes == ()
    assert touched() == stamps
    assert revert(tree, ["alpha", "beta"]).changes
    assert revert(tree, ["alpha", "beta"]).changes == ()
    assert revert(tree, ["never heard of"]).changes == ()


def test_the_blocks_stand_where_the_manifests_say(tree, patches):
    apply(tree, patches.values())
    text = (tree.root / "scheduler.py").read_text()
    plain = [line for line in text.splitlines() if "BLOCK_" not in line]
    start = plain.index("    def schedule(self, budget):")
    assert "\n".join(plain[start:]) == (
        "    def schedule(self, budget):\n"
        "        alpha_first = 1\n"
        "        alpha_next = 2\n"
        "        alpha_third = 3\n"
        "        beta_first = 1\n"
        "        # WAS:         tokens = 0\n"
        "        tokens = 10\n"
        "\n"
        "        # done\n"
        "        for request in self.waiting:\n"
        "            # a comment of the body\n"
        "            if request > budget:\n"
        "                break\n"
        "            tokens += request\n"
        "            beta_in = 7\n"
        "        alpha_out = 4\n"
        "        # WAS:         return tokens  # trailing comment\n"
        "        return tokens + 1\n"
        "        delta = 'never reached'\n"
        "\n\n"
        "# WAS: def limit():\n"
        "# WAS:     return 100\n"
        "def limit():\n"
        "    return 200"
    )


def test_a_patched_package_runs_its_new_code(tree, patches):
    apply(tree, [patches["gamma"], patches["alpha"]])
    code = (
        "import demo.scheduler as s, demo.v1.new.records as r;"
        "print(s.limit(), s.Scheduler().schedule(1), r.VALUES)"
    )
    assert run_python(tree, code) == "200 1 []\n"
    assert list((tree.root / "v1" / "new" / "__pycache__").iterdir())
    revert(tree, ["gamma", "alpha"])
    assert not (tree.root / "v1" / "new").exists()  # its bytecode went with it


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_new_is_for_all_to_read_and_not_to_write(tree, patches, umask):
    before = os.umask(umask)
    try:
        apply(tree, [patches["beta"]])
    finally:
        os.umask(before)
    new = tree.root / "v1" / "new"
    modes = {path.name: path.stat().st_mode & 0o777 for path in [new, *new.rglob("*")]}
    assert modes.pop("new") == modes.pop("deep") == 0o755
    assert set(modes.values()) == {0o644}


def test_a_foreign_file_in_a_folder_of_ours_is_left_alone(tree, patches):
    apply(tree, [patches["beta"]])
    note = tree.root / "v1" / "new" / "deep" / "note.txt"
    note.write_text("mine")
    revert(tree, ["beta"])
    assert note.read_text() == "mine"
    assert [path.name for path in note.parent.iterdir()] == ["note.txt"]


def test_a_parameter_is_replaced_in_one_go(tree, patches):
    apply(tree, patches.values())
    first = snapshot(tree.root)
    plan = apply(tree, [patches["beta"]], {"LIMIT": 250})
    assert [change.path for change in plan.changes] == ["scheduler.py"]
    assert "beta_in = 250\n" in (tree.root / "scheduler.py").read_text()
    state = status(tree, patches.values())["beta"]
    assert (state.state, state.parameters) == ("applied", {"LIMIT": 250})
    apply(tree, [patches["beta"]])
    assert snapshot(tree.root) == first


def test_python_never_runs_stale_bytecode_after_a_change(tree, tmp_path):
    patch = make_patch(
        tmp_path / "p",
        "value",
        [block("replace", "", "def limit():", "def limit():\n    return @N@")],
        parameters={"N": 100},
    )
    code = "import demo.scheduler as s; print(s.limit())"
    for number in (101, 102, 103):  # same size, likely within one second
        apply(tree, [patch], {"N": number})
        assert run_python(tree, code) == f"{number}\n"


def test_bytecode_that_python_would_not_check_goes_on_apply_and_revert(tree, patches):
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    code = "import demo.scheduler as s; print(s.limit())"

    def compile_tree() -> None:
        for optimize in (0, 1):
            path = tree.root / "scheduler.py"
            py_compile.compile(path, optimize=optimize, invalidation_mode=unchecked)

    compile_tree()
    apply(tree, [patches["gamma"]])
    assert run_python(tree, code) == "200\n"
    compile_tree()
    revert(tree, ["gamma"])
    assert list(tree.root.glob("**/scheduler.*.pyc")) == []
    assert run_python(tree, code) == "100\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_bytecode_that_cannot_be_removed_is_refused_and_strands_nothing(
    patches, memory_folder
):
    tree = make_tree(memory_folder / "of_two")
    py_compile.compile(tree.root / "scheduler.py")
    memory_folder.chmod(0o755)
    for folder in (tree.root, tree.root / "v1"):
        os.chown(folder, 65534, 65534)
    before = snapshot(tree.root)
    # Imports the codecs, which another user may not be allowed to read.
    check(tree, [patches["gamma"]])

    def as_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(WriteError, match=r"scheduler.*\.pyc: Permission denied"):
            apply(tree, [patches["gamma"]])
        assert pending(tree) == ""

    assert in_child(as_nobody) == 0
    assert snapshot(tree.root) == before


def test_bytecode_behind_a_linked_folder_is_somebody_elses(tree, patches, tmp_path):
    (tmp_path / "cache").mkdir()
    (tree.root / "__pycache__").symlink_to(tmp_path / "cache")
    py_compile.compile(tree.root / "scheduler.py")
    before = snapshot(tmp_path / "cache"), (tree.root / "scheduler.py").read_bytes()
    with pytest.raises(TargetError, match="__pycache__ is a symbolic link"):
        apply(tree, [patches["gamma"]])
    after = snapshot(tmp_path / "cache"), (tree.root / "scheduler.py").read_bytes()
    assert after == before


def test_bytecode_that_python_keeps_elsewhere_goes_too(
    tree, patches, tmp_path, monkeypatch
):
    """PYTHONPYCACHEPREFIX, or python -X pycache_prefix."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "caches"))
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    source = str(tree.root / "scheduler.py")
    for change in (apply, lambda tree, _: revert(tree, ["gamma"])):
        stale = Path(py_compile.compile(source, invalidation_mode=unchecked))
        assert stale.is_relative_to(tmp_path / "caches")
        change(tree, [patches["gamma"]])
        assert not stale.exists()


def test_a_changed_manifest_replaces_the_old_blocks_everywhere(tree, tmp_path):
    before = snapshot(tree.root)
    old = make_patch(
        tmp_path / "p",
        "moving",
        [block("before", "", "import os", "x = 1")],
        {"old.py": b"", "same.py": b"a = 1\n"},
    )
    apply(tree, [old])
    new = make_patch(
        tmp_path / "p",
        "moving",
        [block("after", "", "import os", "x = 2", file="v1/core.py")],
        {"same.py": b"a = 2\n"},
    )
    assert patch_hash(old) != patch_hash(new)
    assert status(tree, [new])["moving"].state == "partial"
    apply(tree, [new])
    assert status(tree, [new])["moving"].state == "applied"
    assert (tree.root / "scheduler.py").read_bytes() == before["scheduler.py"][1]
    assert not (tree.root / "old.py").exists()
    assert b"a = 2\n" in (tree.root / "same.py").read_bytes()
    revert(tree, ["moving"])
    assert snapshot(tree.root) == before


def test_status_tells_partial_edited_and_outdated_apart(tree, patches, tmp_path):
    alpha = patches["alpha"]
    assert status(tree, [alpha])["alpha"].state == "not applied"
    apply(tree, [alpha])
    core = tree.root / "v1" / "core.py"
    patched = core.read_bytes()
    core.write_bytes(check(tree, [alpha]).files[1].bare)
    assert status(tree, [alpha])["alpha"].state == "partial"
    core.write_bytes(patched.replace(b"import sys", b"import abc"))
    assert status(tree, [alpha])["alpha"].state == "edited"
    core.write_bytes(patched)
    assert status(tree, [alpha])["alpha"].state == "applied"
    newer = make_patch(
        tmp_path / "newer",
        "alpha",
        [
            block("before", "Scheduler.schedule", "tokens = 0", "alpha_first = 9"),
            block("before", "Scheduler.schedule", "tokens = 0", "alpha_third = 3"),
        ],
    )
    assert status(tree, [newer])["alpha"].state == "outdated"
    state = status(tree)["alpha"]
    assert (state.state, state.sha256) == ("applied", None)


def test_diff_shows_the_effect_whether_or_not_it_is_applied(tree, patches):
    before = diff(tree, [patches["gamma"]])
    assert "+    return 200\n" in before and "-    return 100\n" in before
    assert "--- a/v1/bom.py" in before
    apply(tree, [patches["gamma"]])
    assert diff(tree, [patches["gamma"]]) == before
    assert check(tree, [patches["gamma"]]).changes == ()


def test_a_file_hard_linked_elsewhere_is_never_edited_through_the_link(
    tree, patches, tmp_path
):
    cache = tmp_path / "cache"
    cache.mkdir()
    originals = {}
    for path in ("scheduler.py", "v1/core.py"):
        link = cache / Path(path).name
        os.link(tree.root / path, link)
        originals[link] = (link.read_bytes(), link.stat().st_ino, link.stat().st_mode)
    apply(tree, patches.values())
    revert(tree, ["alpha"])
    for link, (content, inode, mode) in originals.items():
        now = link.stat()
        assert (link.read_bytes(), now.st_ino, now.st_mode) == (content, inode, mode)


def test_a_symbolic_link_to_the_package_works(tree, patches, tmp_path):
    link = tmp_path / "elsewhere" / "demo"
    link.parent.mkdir()
    link.symlink_to(tree.root)
    before = snapshot(tree.root)
    linked = Tree(link)
    assert (linked.package, linked.version) == ("demo", "0.18.1")
    apply(linked, patches.values())
    assert status(tree)["alpha"].state == "applied"
    revert(linked, NAMES)
    assert link.is_symlink()
    assert snapshot(tree.root) == before


def test_an_added_file_belongs_to_all_that_add_it(tree, patches):
    records = tree.root / "v1" / "new" / "records.py"
    apply(tree, [patches["beta"]])
    apply(tree, [patches["alpha"]])
    begin, *content, end = records.read_bytes().splitlines(keepends=True)
    assert begin.startswith(b"# BLOCK_BEGIN alpha+beta:v1/new/records.py ")
    assert b"".join(content) == RECORDS
    assert end == begin.replace(b"BEGIN", b"END")
    revert(tree, ["alpha"])
    assert records.read_bytes().startswith(b"# BLOCK_BEGIN beta:")
    revert(tree, ["beta"])
    assert not records.parent.exists()


def test_overlaps_are_refused_in_either_order(tree, tmp_path):
    loop = "for request in self.waiting:"
    where = "Scheduler.schedule"
    whole = [block("replace", where, loop, "for request in ():\n    pass")]
    inner = {
        "before": block("before", where, "tokens += request", "x = 1"),
        "after": block("after", where, "tokens += request", "x = 1"),
        "replace": block("replace", where, "tokens += request", "x = 1"),
        "same": block("replace", where, loop, "pass"),
    }
    outer = make_patch(tmp_path / "p", "outer", whole)
    shot = snapshot(tree.root)
    for name, spec in inner.items():
        patch = make_patch(tmp_path / "p", name, [spec])
        for order in ([outer, patch], [patch, outer]):
            apply(tree, order[:1])
            with pytest.raises(ConflictError, match=r"outer:b0") as refusal:
                apply(tree, order[1:])
            assert f"{name}:b0" in str(refusal.value)
            revert(tree, [order[0].name])
        with pytest.raises(ConflictError):
            apply(tree, [outer, patch])
    assert snapshot(tree.root) == shot


# By commit, the files (as Latin-1) that an earlier version of kvtax changed or added
# when it applied alpha, beta, gamma and delta.
TREES = json.loads(Path(__file__).with_name("earlier_trees.json").read_text())
APPLIED = ["alpha", "beta", "delta", "gamma"]


@pytest.fixture(params=TREES)
def earlier(request, tree):
    """The tree of an earlier version, and what it was before that."""
    before = snapshot(tree.root)
    for path, text in TREES[request.param].items():
        place = tree.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("latin-1"))
    return tree, before


@pytest.mark.slow
def test_all_patches_are_seen_and_come_out_in_any_order(earlier):
    tree, before = earlier
    patched = {path: content for path, (_, content) in snapshot(tree.root).items()}
    assert {name: state.state for name, state in status(tree).items()} == dict.fromkeys(
        APPLIED, "applied"
    )
    for order in itertools.permutations(APPLIED):
        for count, name in enumerate(order, 1):
            assert set(revert(tree, [name]).left) == set(order[count:])
        assert snapshot(tree.root) == before
        for path, content in patched.items():
            if content is None:
                (tree.root / path).mkdir(exist_ok=True)
            else:
                (tree.root / path).write_bytes(content)


def test_to_apply_again_brings_a_tree_up_to_date(earlier, patches):
    tree, before = earlier
    chosen = [patches[name] for name in APPLIED]
    apply(tree, chosen)
    text = b"".join(content or b"" for _, content in snapshot(tree.root).values())
    assert b"sha256:" not in text and b"order=" not in text
    assert check(tree, chosen).changes == ()
    revert(tree, APPLIED)
    assert snapshot(tree.root) == before


def test_an_edit_of_an_earlier_block_is_seen(earlier, patches):
    tree, _ = earlier
    place = tree.root / "scheduler.py"
    place.write_bytes(place.read_bytes().replace(b"alpha_out = 4", b"alpha_out = 5"))
    assert status(tree, patches.values())["alpha"].state == "edited"
