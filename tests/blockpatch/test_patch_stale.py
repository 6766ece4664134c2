# SPDX-License-Identifier: Apache-2.0
"""Somebody changes the tree after a call was killed: never replay over their work."""

import contextlib
import errno
import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patchlab import (
    FILES,
    NEED_SPACE,
    NEXT_RELEASE,
    at_step,
    in_child,
    restore,
    snapshot,
    upgrade,
    without_ours,
)

from blockpatch import DamagedError, Tree, UnfinishedError, pending, settle, status

pytestmark = pytest.mark.slow


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


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
    root, _, calls = two_calls
    work, before, after = calls[verb]
    restore(root, before)
    stop(work, kill_at, full_at)
    killed = without_ours(snapshot(root))
    deed(root, target, before)
    everything = snapshot(root)
    left = without_ours(everything)
    tree = Tree(root)

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
        "before it changed anything": left,
        "gives that change up": left,
        "first undoes that change": whole[0],
        "first finishes that change": whole[1],
    }
    assert all(state == promises[words] for words in promises if words in said)
    settle(tree)  # once said, it is over
    assert snapshot(root) == state and pending(tree) == ""
