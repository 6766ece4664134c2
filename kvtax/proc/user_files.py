# SPDX-License-Identifier: Apache-2.0
"""Folders and locks of one user, which no other user can make, replace or hold."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OTHERS_WRITE = 0o022


class LockHeld(Exception):
    """Another process of this user holds the lock; `pid` is its id, 0 if not known."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"held by process {pid}")
        self.pid = pid


def runtime_folder() -> Path:
    """Return a folder where only this user (or root) can make files.

    A cleaner of /tmp does not look there. Without any such folder it is one of this
    user below the folder for temporary files. Raises OSError.
    """
    user = os.geteuid()
    places = [Path("/run")] if user == 0 else []
    places += [Path(f"/run/user/{user}"), *_named("XDG_RUNTIME_DIR"), *_named("HOME")]
    return next(filter(_is_private, places), None) or _temporary(user)


def _named(variable: str) -> list[Path]:
    return [Path(place)] if (place := os.environ.get(variable)) else []


def _is_private(folder: Path) -> bool:
    """Return whether `folder` is this user's, writable, and of use in PYTHONPATH."""
    try:
        status = folder.stat()
    except OSError:
        return False
    is_own = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
    is_usable = folder.is_absolute() and os.pathsep not in str(folder)
    return is_own and is_usable and os.access(folder, os.W_OK | os.X_OK)


def _temporary(user: int) -> Path:
    """Make this user's own folder; a name that another user has taken is passed over.

    It stays when it is empty: a name that is gone could be taken.
    """
    parent = Path(tempfile.gettempdir())
    if os.pathsep in str(parent):
        parent = Path("/tmp")
    for number in range(1_000):
        folder = parent / f"kvtax-{user}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(0o755)
        if not folder.is_symlink() and _is_private(folder):
            return folder
    raise OSError(
        f"{parent}: no folder of user {user} can be made; set XDG_RUNTIME_DIR"
    )


@contextmanager
def user_lock(name: str) -> Iterator[None]:
    """Hold the lock `name` of this user. Raises LockHeld and OSError.

    The kernel releases it however the process ends.
    """
    path = runtime_folder() / name
    lock = _acquired(path)
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def _acquired(path: Path) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(path, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and flock.
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        except BlockingIOError:
            text = os.pread(lock, 32, 0).decode(errors="replace")
            os.close(lock)
            raise LockHeld(int(text) if text.isdigit() else 0) from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
