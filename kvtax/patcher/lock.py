# SPDX-License-Identifier: Apache-2.0
"""Lock of a tree, a file in the package directory: one call at a time changes it."""

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import LockedError, TargetError, WriteError
from .target import LOCK, Tree

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# A pipe in place of the lock is opened at once.
_HOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def locked(tree: Tree) -> Iterator[None]:
    """Hold the tree's lock. Ctrl-C, SIGTERM and SIGHUP wait until it is released.

    Raises LockedError with the holder's pid, TargetError for a read-only tree.
    """
    require_writable(tree.root)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        lock = _acquire(tree.root / LOCK)
        try:
            yield
        finally:
            # A disk that has become read-only keeps it; the next call takes it over.
            with contextlib.suppress(OSError):
                (tree.root / LOCK).unlink()
            os.close(lock)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def require_unlocked(tree: Tree) -> None:
    """Raise LockedError if a call is changing the tree right now. Writes nothing."""
    try:
        lock = os.open(tree.root / LOCK, os.O_RDONLY | _HOW)
    except OSError:  # no lock, or not one that this user may look at
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _held(tree.root, lock) from None
    finally:
        os.close(lock)


def require_writable(folder: Path) -> None:
    """Raise TargetError for a read-only folder; for root too, whom no mode stops."""
    if not os.access(folder, os.W_OK) or not folder.stat().st_mode & 0o222:
        raise TargetError(
            f"{folder} is read-only; make a copy of the package that you may change, "
            "or run as its owner"
        )


def _acquire(path: Path) -> int:
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | _HOW, 0o600)
        except OSError as error:
            raise WriteError(f"{path}: {error.strerror}; nothing was changed") from None
        try:
            _require_own(path, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and flock.
            if os.stat(path).st_ino == os.fstat(lock).st_ino:
                os.ftruncate(lock, 0)
                os.write(lock, str(os.getpid()).encode())
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            refusal = _held(path.parent, lock)
            os.close(lock)
            raise refusal from None
        except OSError as error:
            os.unlink(path)
            os.close(lock)
            raise WriteError(f"{path}: {error.strerror}; nothing was changed") from None
        os.close(lock)


def _require_own(path: Path, lock: int) -> None:
    """Raise TargetError for a file that is also somewhere else, or somebody else's."""
    status = os.fstat(lock)
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if not is_file or status.st_uid != os.geteuid():
        os.close(lock)
        raise TargetError(
            f"{path} was not made by this user's call (owner {status.st_uid}, "
            f"{status.st_nlink} links); nothing was changed, remove it"
        )


def _held(root: Path, lock: int) -> LockedError:
    pid = os.pread(lock, 32, 0).decode() or "unknown"
    return LockedError(f"{root} is being changed by process {pid}; try again later")
