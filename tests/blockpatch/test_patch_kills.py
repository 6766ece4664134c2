# SPDX-License-Identifier: Apache-2.0
"""A call that is killed, interrupted or out of disk leaves the old or the new state."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patchlab import (
    NEED_SPACE,
    at_step,
    in_child,
    killed_at,
    make_patches,
    make_tree,
    snapshot,
)

from blockpatch import LockedError, WriteError, apply, pending, revert, settle, status
from blockpatch.lock import locked
from blockpatch.target import LOCK

pytestmark = pytest.mark.slow

MANY = 1000


@pytest.fixture(scope="module")
def lab(memory_folder):
    """Two calls, each with the states of the tree before and after it."""
    folder = memory_folder
    tree, patches = make_tree(folder / "site"), make_patches(folder / "patches")
    apply(tree, [patches["gamma"]])
    old = snapshot(tree.root)
    chosen = [patches["alpha"], patches["beta"]]
    apply(tree, chosen)
    new = snapshot(tree.root)
    revert(tree, ["alpha", "beta"])
    assert snapshot(tree.root) == old != new
    come, go = partial(apply, tree, chosen), partial(revert, tree, ["alpha", "beta"])
    return tree, {"apply": (come, go, old, new), "revert": (go, come, new, old)}


def start(lab, verb):
    """Bring the tree into the state before ``verb``."""
    tree, calls = lab
    work, back, before, after = calls[verb]
    back()
    assert snapshot(tree.root) == before
    return tree, work, before, after


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_a_kill_at_any_step_ends_in_exactly_the_old_or_the_new_state(lab, verb):
    seen = []
    for number in range(1, MANY):
        tree, work, before, after = start(lab, verb)
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
def test_a_kill_of_the_call_that_cleans_up_is_cleaned_up_too(lab, first, second, verb):
    tree, work, before, after = start(lab, verb)
    killed_at(first, work)
    killed_at(second, lambda: settle(tree))
    settle(tree)
    assert snapshot(tree.root) in (before, after)


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_step_is_undone_with_a_clear_error(lab, verb, lasting):
    def full() -> None:
        if lasting:
            at_step(1, full, names=("open", "write"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(1, MANY):
        tree, work, before, after = start(lab, verb)

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


FULL_DISK = """
import pathlib, subprocess, sys
sys.path[:0] = {path!r}
place = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place], check=True)
from patchlab import make_patches, make_tree, snapshot
from blockpatch import WriteError, apply, revert
patches = make_patches(place.parent / "patches").values()
tree = make_tree(place)
before = snapshot(tree.root)
filler = place / "filler"
refused = done = 0
for left in range(0, 200_000, 8192):
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    free = filler.stat().st_size - left
    with open(filler, "rb+") as file:
        file.truncate(max(free, 0))
    try:
        apply(tree, patches)
        done += 1
        revert(tree, ["alpha", "beta", "gamma", "delta", "epsilon"])
    except WriteError as error:
        assert "No space left" in str(error), error
        refused += 1
    filler.unlink()
    revert(tree, ["alpha", "beta", "gamma", "delta", "epsilon"])
    assert snapshot(tree.root) == before, left
print("refused", refused > 0, "done", done > 0)
"""


def test_a_really_full_file_system_is_undone(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    probe = "mount -t tmpfs -o size=64k tmpfs " + str(place)
    own = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*own, "sh", "-c", probe], capture_output=True).returncode:
        pytest.skip("may not mount a file system of its own")
    here = Path(__file__).resolve().parent
    script = textwrap.dedent(FULL_DISK).format(path=[str(here), str(here.parents[1])])
    run = [*own, sys.executable, "-c", script, str(place)]
    out = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert out.stdout == "refused True done True\n", out.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("number", [1, 4, 20, 40])
def test_a_signal_waits_until_the_change_is_whole(lab, sent, number):
    tree, work, _, after = start(lab, "apply")

    def signalled() -> None:
        at_step(number, lambda: os.kill(os.getpid(), sent))
        work()

    code = os.waitstatus_to_exitcode(in_child(signalled))
    assert code == (130 if sent == signal.SIGINT else -signal.SIGTERM)
    assert snapshot(tree.root) == after  # without another call


def test_a_held_lock_is_refused_with_the_pid_and_a_dead_one_is_no_obstacle(lab):
    tree, work, before, after = start(lab, "apply")
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
    lab, monkeypatch
):
    tree, work, before, _ = start(lab, "apply")
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


def test_calls_in_many_processes_at_once_leave_a_whole_state(lab):
    tree, calls = lab
    children = []
    for verb in ["apply", "revert"] * 4:
        pid = os.fork()
        if pid == 0:
            for _ in range(5):
                try:
                    calls[verb][0]()
                except LockedError:
                    pass
                except BaseException:
                    os._exit(1)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 8
    assert snapshot(tree.root) in (calls["apply"][2], calls["apply"][3])
