# SPDX-License-Identifier: Apache-2.0
"""A call that is killed, interrupted or out of disk leaves the old or the new state."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtax.patcher import (
    BlockPatchError,
    DamagedError,
    LockedError,
    TargetError,
    Tree,
    UnfinishedError,
    WriteError,
    apply,
    check,
    diff,
    engine,
    pending,
    revert,
    settle,
    status,
)
from kvtax.patcher.cli import main
from kvtax.patcher.lock import locked
from kvtax.patcher.target import JOURNAL, LOCK
from tests.patcher.patchlab import (
    FILES,
    NEED_SPACE,
    NEXT_RELEASE,
    at_step,
    in_child,
    killed_at,
    restore,
    snapshot,
    upgrade,
    without_ours,
)

pytestmark = pytest.mark.slow

MANY = 1000


def start(two_calls, verb):
    """Bring the tree into the state before ``verb``."""
    root, _, calls = two_calls
    work, before, after = calls[verb]
    restore(root, before)
    return Tree(root), work, before, after


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_kill_at_any_step_ends_in_exactly_the_old_or_the_new_state(two_calls, verb):
    seen = []
    for number in range(1, MANY):
        tree, work, before, after = start(two_calls, verb)
        if not killed_at(number, work):
            break
        left = snapshot(tree.root)
        status(tree)
        assert snapshot(tree.root) == left  # reading never writes
        settle(tree)
        state = snapshot(tree.root)
        assert state in (before, after), f"killed at step {number}"
        seen.append(state == after)
    assert number > 20
    # Once whole, never taken back.
    assert seen == sorted(seen) and set(seen) == {False, True}


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(1, 90), st.integers(1, 40), st.sampled_from(["apply", "revert"]))
def test_a_kill_of_the_call_that_cleans_up_is_cleaned_up_too(
    two_calls, first, second, verb
):
    tree, work, before, after = start(two_calls, verb)
    killed_at(first, work)
    killed_at(second, lambda: settle(tree))
    settle(tree)
    assert snapshot(tree.root) in (before, after)


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_step_is_undone_with_a_clear_error(two_calls, verb, lasting):
    def full() -> None:
        if lasting:
            at_step(1, full, names=("open", "write"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(1, MANY):
        tree, work, before, after = start(two_calls, verb)

        def attempt(number=number, work=work) -> None:
            count = at_step(number, full, names=NEED_SPACE)
            try:
                work()
            except WriteError as error:
                assert "No space left" in str(error)
                os._exit(7)
            assert count[0] < number

        code = os.waitstatus_to_exitcode(in_child(attempt))
        assert code in (0, 7), f"step {number}"
        if code == 0:
            assert snapshot(tree.root) == after
            break
        assert snapshot(tree.root) == before, f"step {number}"
    assert number > 15


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("number", [1, 4, 20, 40])
def test_a_signal_waits_until_the_change_is_whole(two_calls, sent, number):
    tree, work, _, after = start(two_calls, "apply")

    def signalled() -> None:
        at_step(number, lambda: os.kill(os.getpid(), sent))
        work()

    code = os.waitstatus_to_exitcode(in_child(signalled))
    assert code == (130 if sent == signal.SIGINT else -signal.SIGTERM)
    assert snapshot(tree.root) == after  # without another call


def test_a_held_lock_is_refused_with_the_pid_and_a_dead_one_is_no_obstacle(two_calls):
    tree, work, before, after = start(two_calls, "apply")
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        with locked(tree):
            os.write(writer, b"x")
            signal.pause()
    os.read(reader, 1)
    try:
        read = partial(status, tree), partial(pending, tree)
        for call in (work, partial(revert, tree, ["gamma"]), *read):
            with pytest.raises(LockedError, match=rf"process {holder}\b"):
                call()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    settle(tree)
    assert snapshot(tree.root) == before
    work()
    assert snapshot(tree.root) == after


def test_a_lock_file_removed_between_open_and_lock_does_not_let_two_in(
    two_calls, monkeypatch
):
    tree, work, before, _ = start(two_calls, "apply")
    lock = tree.root / LOCK
    flock, rivals = fcntl.flock, []

    def overtaken(handle: int, how: int) -> None:
        flock(handle, how)
        if not rivals:  # the last holder leaves, and a rival is quicker than we are
            lock.unlink()
            rivals.append(lock.open("w"))
            flock(rivals[0], fcntl.LOCK_EX)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(LockedError):
        work()
    rivals[0].close()
    settle(tree)
    assert snapshot(tree.root) == before


# What an interrupted change left is finished, undone or given up.


def killed_after_its_decision(two_calls, verb: str = "apply") -> Tree:
    """The tree, with ``verb`` killed between change.json and the first replace."""
    tree, work, before, _ = start(two_calls, verb)

    def decided() -> None:
        replace = os.replace

        def replace_and_die(source, target, **folders):
            replace(source, target, **folders)
            assert target == "change.json"
            os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_and_die
        work()

    assert os.waitstatus_to_exitcode(in_child(decided)) == -signal.SIGKILL
    assert without_ours(snapshot(tree.root)) == before
    return tree


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_an_upgraded_tree_is_never_set_back_by_a_look_at_its_status(
    two_calls, verb, capsys, memory_folder
):
    tree = killed_after_its_decision(two_calls, verb)
    shutil.rmtree(tree.root / "v1/new", ignore_errors=True)
    upgrade(tree.root)
    upgraded = without_ours(snapshot(tree.root))

    def call(*argv: str) -> tuple[int, str, str]:
        argv = (*argv, "--target", str(tree.root))
        return main(None, memory_folder, argv), *capsys.readouterr()

    code, out, _ = call("--status")
    assert code == 0
    assert "interrupted: an earlier call was killed while it changed" in out
    assert "the release is 2.0 now, no longer 0.18.1" in out
    assert "alpha: not applied" in out
    assert without_ours(snapshot(tree.root)) == upgraded
    code, out, err = call("--apply", "--patch", "gamma")
    assert (code, out) == (2, "")
    assert "That change was given up now and every file left as it is" in err
    assert snapshot(tree.root) == upgraded
    assert call("--apply", "--patch", "gamma")[0] == 0
    assert "interrupted" not in call("--status")[1]
    assert call("--revert", "--patch", "gamma")[0] == 0
    assert snapshot(tree.root) == upgraded


def test_a_change_planned_for_one_release_is_not_finished_in_another(two_calls):
    """Even where all its files are the same: another release may need other blocks."""
    tree = killed_after_its_decision(two_calls)
    (tree.root / "_version.py").write_bytes(NEXT_RELEASE["_version.py"])
    left = without_ours(snapshot(tree.root))
    with pytest.raises(UnfinishedError, match=r"release is 2\.0 now"):
        settle(Tree(tree.root))
    assert snapshot(tree.root) == left


def test_what_would_only_read_refuses_before_an_interrupted_change_is_dealt_with(
    two_calls,
):
    tree, gamma = killed_after_its_decision(two_calls), two_calls[1]["gamma"]
    shot = snapshot(tree.root)
    for read in (check, diff):
        with pytest.raises(UnfinishedError, match="next --apply or --revert first und"):
            read(tree, [gamma])
    assert snapshot(tree.root) == shot
    settle(tree)
    assert check(tree, [gamma]).changes == ()


_WITHOUT_HASHES = (
    b'{"made": [], "entries": '
    b'[{"path": "scheduler.py", "had": true, "has": true, "dirs": []}]}'
)
BAD_JOURNALS = {
    "empty": (lambda whole: b"", "cannot be read"),
    "torn": (lambda whole: whole[: len(whole) // 2], "cannot be read"),
    "zeros": (lambda whole: bytes(len(whole)), "cannot be read"),
    "a list": (lambda whole: b"[]", "cannot be read"),
    "a field less": (lambda whole: whole.replace(b'"new"', b'"now"'), "cannot be read"),
    "without hashes": (lambda whole: _WITHOUT_HASHES, "cannot be read"),
    "deep": (lambda whole: b"[" * 100_000, "cannot be read"),
    "newer": (lambda whole: whole.replace(b'format": 3', b'format": 4'), "another ver"),
}


@pytest.mark.parametrize("make, said", BAD_JOURNALS.values(), ids=BAD_JOURNALS)
def test_a_journal_that_does_not_say_enough_is_given_up(two_calls, make, said):
    tree = killed_after_its_decision(two_calls)
    before = without_ours(snapshot(tree.root))
    change = tree.root / JOURNAL / "change.json"
    change.write_bytes(make(change.read_bytes()))
    assert said in pending(tree)
    with pytest.raises(UnfinishedError, match=said):
        settle(tree)
    assert snapshot(tree.root) == before


def test_a_content_damaged_in_the_journal_never_gets_into_the_tree(two_calls):
    tree = killed_after_its_decision(two_calls)
    scheduler = tree.root / "scheduler.py"
    journal = json.loads((tree.root / JOURNAL / "change.json").read_text())
    number = [file["path"] for file in journal["files"]].index("scheduler.py")
    shutil.copyfile(tree.root / JOURNAL / f"new-{number}", scheduler)
    (tree.root / JOURNAL / f"old-{number}").write_bytes(b"")
    before = without_ours(snapshot(tree.root))
    with pytest.raises(UnfinishedError):
        settle(tree)
    assert snapshot(tree.root) == before


@pytest.mark.parametrize("path", ["scheduler.py", "v1/new/records.py"])
def test_an_edit_made_while_a_call_works_is_kept(two_calls, path, monkeypatch):
    tree, _, before, _ = start(two_calls, "apply")
    root, patches, _ = two_calls
    plan = engine.plan_apply

    def edited_meanwhile(*args, **options):
        planned = plan(*args, **options)
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(b"mine = 1\n")
        return planned

    monkeypatch.setattr(engine, "plan_apply", edited_meanwhile)
    with pytest.raises(LockedError, match=rf"somebody has changed {re.escape(path)}"):
        apply(tree, [patches["alpha"]])
    state = snapshot(root)
    assert state.pop(path)[1] == b"mine = 1\n"
    state.pop("v1/new", None)
    assert state == {p: it for p, it in before.items() if p != path}


def test_calls_killed_beside_each_other_leave_a_whole_state(two_calls):
    _, _, before, after = start(two_calls, "apply")
    root, _, calls = two_calls
    kills = 0
    for number in range(10, 50, 3):
        pids = []
        for verb in ["apply", "revert"] * 2:
            pid = os.fork()
            if pid == 0:
                os.close(1)
                at_step(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
                while True:
                    try:
                        calls[verb][0]()
                    except LockedError:
                        continue
                    except BaseException:
                        os._exit(1)
            pids.append(pid)
        for pid in pids:
            kills += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        settle(Tree(root))
        assert snapshot(root) in (before, after)
    assert kills == 4 * len(range(10, 50, 3))


def test_leftovers_alone_are_no_change(two_calls):
    tree, _, before, _ = start(two_calls, "apply")
    root = tree.root
    (root / LOCK).write_text("12345")
    (root / LOCK).chmod(0o600)
    (root / JOURNAL).mkdir(0o700)
    (root / JOURNAL / "new-0").write_bytes(b"half")
    assert "before any change" in pending(tree)
    settle(tree)
    assert snapshot(root) == before


def hostile_file(path: str, content: bytes) -> dict[str, str | None]:
    return {"path": path, "old": hashlib.sha256(content).hexdigest(), "new": None}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "outside", "link", "v1", "", "x.py", "/"]),
        min_size=1,
        max_size=5,
    ),
    is_absolute=st.booleans(),
    mode=st.sampled_from([0o700, 0o755, 0o777]),
)
def test_no_journal_changes_a_file_outside_of_the_tree(
    two_calls, parts, is_absolute, mode
):
    """A tree of somebody else may hold a journal, and links, as it likes."""
    tree, _, _, _ = start(two_calls, "apply")
    root, patches, _ = two_calls
    outside = root.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    outside.mkdir()
    (outside / "x.py").write_text("precious\n")
    (root / "link").symlink_to(outside)
    (root / JOURNAL).mkdir()
    (root / JOURNAL).chmod(mode)
    content = b"evil\n"
    path = "/".join(parts)
    if is_absolute:
        path = f"{outside}/{path}"
    files = [hostile_file(p, content) for p in (path, "link/x.py", "link/new.py")]
    files[1]["new"] = hashlib.sha256(b"precious\n").hexdigest()
    for number in range(len(files)):
        (root / JOURNAL / f"old-{number}").write_bytes(content)
    journal = {"format": 3, "version": tree.version, "added": [path], "files": files}
    (root / JOURNAL / "change.json").write_text(json.dumps(journal))
    before = snapshot(outside)
    for _ in range(2):
        with contextlib.suppress(BlockPatchError):
            apply(tree, [patches["alpha"]])
        with contextlib.suppress(BlockPatchError):
            revert(tree, ["alpha"])
    assert snapshot(outside) == before
    assert {path.name for path in root.parent.iterdir()} <= {root.name, "outside"}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make another user's files")
def test_a_journal_of_another_user_is_refused_and_left_alone(two_calls):
    tree = killed_after_its_decision(two_calls)
    os.chown(tree.root / JOURNAL, 65534, 65534)
    before = snapshot(tree.root)
    before.pop(LOCK)
    with pytest.raises(TargetError, match="owner 65534"):
        settle(tree)
    assert snapshot(tree.root) == before


def test_a_lock_that_is_a_link_to_another_file_is_refused(two_calls):
    tree, _, _, _ = start(two_calls, "apply")
    precious = tree.root.parent / "precious"
    precious.write_text("kept")
    os.link(precious, tree.root / LOCK)
    with pytest.raises(TargetError, match="2 links"):
        settle(tree)
    assert precious.read_text() == "kept"
    precious.unlink()


def test_a_journal_that_cannot_be_removed_is_no_failure(two_calls, monkeypatch):
    tree, _, before, after = start(two_calls, "apply")
    root, patches, _ = two_calls

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvtax.patcher.journal.shutil.rmtree", fail)
    plan = apply(tree, [patches["alpha"], patches["beta"]])
    assert "the change is whole" in plan.note
    assert without_ours(snapshot(root)) == after
    monkeypatch.undo()
    assert revert(tree, ["alpha", "beta"]).note == ""
    assert snapshot(root) == before


def test_a_lock_that_cannot_be_removed_hides_no_message(two_calls, monkeypatch):
    tree, _, _, _ = start(two_calls, "apply")
    unlink = Path.unlink

    def fail(path, *_, **__):
        if path.name == LOCK:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(DamagedError), locked(tree):
        raise DamagedError("the message")


# What somebody may do to the tree: before and after are the states around the call,
# and target is one of the files that it changes.


def nothing(root, target, before): ...


def edit_one(root, target, before):
    if (root / target).exists():
        with open(root / target, "ab") as file:
            file.write(b"# mine\n")


def edit_another(root, target, before):
    edit_one(root, "v1/bom.py", before)


def delete_one(root, target, before):
    (root / target).unlink(missing_ok=True)


def put_one_back(root, target, before):
    if target in before:
        check_out_the_old(root, target, {target: before[target]})
    else:
        delete_one(root, target, before)


def check_out_the_old(root, target, before):
    for path, (_, content) in before.items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)


def check_out_the_package(root, target, before):
    for path, content in FILES.items():
        (root / path).write_bytes(content)


def upgrade_with_the_same_files(root, target, before):
    check_out_the_old(root, target, before)
    (root / "_version.py").write_bytes(NEXT_RELEASE["_version.py"])


def link_one(root, target, before):
    if (root / target).exists():
        (root / target).rename(root.parent / "linked")
        (root / target).symlink_to(root.parent / "linked")


DEEDS = [
    nothing,
    edit_one,
    edit_another,
    delete_one,
    put_one_back,
    check_out_the_old,
    check_out_the_package,
    lambda root, *_: upgrade(root),
    upgrade_with_the_same_files,
    link_one,
]
TARGETS = [
    "scheduler.py",
    "v1/core.py",
    "v1/new/__init__.py",
    "v1/new/deep/more.py",
    "v1/new/records.py",
]


def stop(work, kill_at: int, full_at: int | None) -> None:
    """Kill ``work`` before a step, or as many steps after the disk was full."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def full() -> None:
        at_step(kill_at, kill)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stopped() -> None:
        if full_at is None:
            at_step(kill_at, kill)
        else:
            at_step(full_at, full, names=NEED_SPACE)
        work()

    in_child(stopped)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    verb=st.sampled_from(["apply", "revert"]),
    kill_at=st.integers(1, 50),
    full_at=st.none() | st.integers(15, 40),
    deed=st.sampled_from(DEEDS),
    target=st.sampled_from(TARGETS),
)
def test_recovery_ends_all_old_or_all_new_or_leaves_what_somebody_left(
    two_calls, verb, kill_at, full_at, deed, target
):
    tree, work, before, after = start(two_calls, verb)
    root = tree.root
    stop(work, kill_at, full_at)
    killed = without_ours(snapshot(root))
    deed(root, target, before)
    everything = snapshot(root)
    left = without_ours(everything)
    said = pending(tree)
    with contextlib.suppress(DamagedError):
        status(tree)
    assert snapshot(root) == everything

    try:
        settle(tree)
        given_up = False
    except UnfinishedError as error:
        given_up = True
        assert str(root) in str(error) and "call again" in str(error)
    state = snapshot(root)

    changing = {p for p in before | after if before.get(p) != after.get(p)}
    rest = {path: it for path, it in left.items() if path not in changing}
    whole = [
        rest | {path: it for path, it in shot.items() if path in changing}
        for shot in (before, after)
    ]
    if left == killed or deed is edit_another:
        assert state in whole and not given_up
    elif not given_up:
        assert state in (*whole, left)
    foreign = {p for p in left if left[p] not in (before.get(p), after.get(p))}
    if given_up:
        assert state == left
    elif "first" in said:
        assert not foreign & changing and "_version.py" not in foreign
    promises = {
        "before any change": left,
        "after it had changed everything": whole[1],
        "gives that change up": left,
        "first undoes that change": whole[0],
    }
    assert all(state == promises[words] for words in promises if words in said)
    settle(tree)  # once said, it is over
    assert snapshot(root) == state and pending(tree) == ""
