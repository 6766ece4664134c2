# SPDX-License-Identifier: Apache-2.0
"""A call that is killed, interrupted or out of disk leaves the old or the new state."""

import errno
import fcntl
import os
import signal
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtax.patcher import (
    LockedError,
    Tree,
    WriteError,
    pending,
    revert,
    settle,
    status,
)
from kvtax.patcher.lock import locked
from kvtax.patcher.target import LOCK
from tests.patcher.patchlab import (
    NEED_SPACE,
    at_step,
    in_child,
    killed_at,
    restore,
    snapshot,
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
    # Once decided, always finished: no way back to the old state later on.
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
