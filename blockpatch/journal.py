# SPDX-License-Identifier: Apache-2.0
"""All or nothing: a tree is changed under a lock, through a journal.

Everything is first written into ``.blockpatch-journal`` in the package directory: new
contents and copies of the old ones. Renaming ``redo.json`` into place is the decision;
from then on only renames, removals and directories are left, and each of them can be
done again. A killed call leaves the journal, and the next one deals with it: forward
with ``redo.json``, back with ``undo.json``; with neither nothing was changed yet.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import LockedError, TargetError, WriteError
from .plan import Change
from .target import JOURNAL, LOCK, Tree

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@contextlib.contextmanager
def locked(tree: Tree) -> Iterator[None]:
    """Hold the tree's lock, having finished what a killed call left.

    Ctrl-C, SIGTERM and SIGHUP wait until the lock is released. Raises LockedError with
    the holder's pid, TargetError for a read-only tree.
    """
    _require_writable(tree.root)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        lock = _acquire(tree.root / LOCK)
        try:
            _recover(tree.root)
            yield
        finally:
            (tree.root / LOCK).unlink(missing_ok=True)
            os.close(lock)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def settle(tree: Tree) -> None:
    """Before reading only: finish what a killed call left, if there are traces."""
    if any((tree.root / name).exists() for name in (JOURNAL, LOCK)):
        with locked(tree):
            pass


def _acquire(path: Path) -> int:
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WriteError(f"{path}: {error.strerror}; nothing was changed") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and flock.
            if os.stat(path).st_ino == os.fstat(lock).st_ino:
                os.ftruncate(lock, 0)
                os.write(lock, str(os.getpid()).encode())
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            raise LockedError(
                f"{path.parent} is being changed by process {pid}; try again later"
            ) from None
        except OSError as error:
            os.unlink(path)
            os.close(lock)
            raise WriteError(f"{path}: {error.strerror}; nothing was changed") from None
        os.close(lock)


def _require_writable(folder: Path) -> None:
    """Also for root, to whom the system would not say no."""
    if not os.access(folder, os.W_OK) or not folder.stat().st_mode & 0o222:
        raise TargetError(
            f"{folder} is read-only; make a copy of the package that you may change, "
            "or run as its owner"
        )


def commit(tree: Tree, changes: Iterable[Change]) -> None:
    """Bring all the changes about, or none. The lock must be held.

    Raises TargetError (read-only) or WriteError (say, disk full), the tree as it was.
    """
    changes = list(changes)
    if not changes:
        return
    for change in changes:
        parents = Path(change.path).parents[change.dirs :]
        _require_writable(tree.root / parents[0])
    journal = tree.root / JOURNAL
    try:
        _prepare(tree.root, journal, changes)
        _redo(tree.root, journal)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.replace(journal / "redo.json", journal / "undo.json")
        _recover(tree.root)
        if isinstance(error, OSError):
            raise WriteError(
                f"{error.filename or tree.root}: {error.strerror}; "
                "all changes were undone"
            ) from error
        raise
    with _left_for_the_next_call(tree.root):
        _discard(journal)


def _recover(root: Path) -> None:
    journal = root / JOURNAL
    if not journal.exists():
        return
    with _left_for_the_next_call(root):
        if (journal / "undo.json").exists():
            _undo(root, journal)
        elif (journal / "redo.json").exists():
            _redo(root, journal)
        _discard(journal)


@contextlib.contextmanager
def _left_for_the_next_call(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{error.filename or root}: {error.strerror}; an interrupted change is "
            "still to be finished, the next call will try again"
        ) from error


def _discard(journal: Path) -> None:
    """Without its decision first, a journal half removed means nothing."""
    for name in ("redo.json", "undo.json"):
        (journal / name).unlink(missing_ok=True)
    if journal.exists():
        shutil.rmtree(journal)


def _prepare(root: Path, journal: Path, changes: list[Change]) -> None:
    journal.mkdir()
    entries = []
    for number, change in enumerate(changes):
        target = root / change.path
        if change.old is not None:
            _store(journal / f"old-{number}", change.old, like=target)
        if change.new is not None:
            _store(journal / f"new-{number}", change.new, like=target)
            if change.old is not None:
                _set_later_time(journal / f"new-{number}", target)
        entries.append(
            {
                "path": change.path,
                "had": change.old is not None,
                "has": change.new is not None,
                "dirs": change.own_dirs(),
            }
        )
    made = {d for entry in entries for d in entry["dirs"] if not (root / d).exists()}
    decision = {"entries": entries, "made": sorted(made)}
    _store(journal / "draft.json", json.dumps(decision).encode())
    _sync(journal)
    os.replace(journal / "draft.json", journal / "redo.json")
    _sync(journal)


def _store(path: Path, content: bytes, like: Path | None = None) -> None:
    """Write and fsync; owner, mode and time as ``like`` if that exists."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        if like is not None and like.exists():
            stat = like.stat()
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), stat.st_uid, stat.st_gid)
            os.fchmod(file.fileno(), stat.st_mode & 0o7777)
            os.utime(file.fileno(), ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.fsync(file.fileno())


def _set_later_time(path: Path, target: Path) -> None:
    """Python trusts a .pyc by the source's size and whole second: never repeat one."""
    second = int(target.stat().st_mtime) + 1
    later_ns = max(time.time_ns(), second * 1_000_000_000)
    os.utime(path, ns=(later_ns, later_ns))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def _redo(root: Path, journal: Path) -> None:
    decision = _load(journal / "redo.json")
    for folder in decision["made"]:
        os.makedirs(root / folder, exist_ok=True)
    for number, entry in enumerate(decision["entries"]):
        new = journal / f"new-{number}"
        if new.exists():
            os.replace(new, root / entry["path"])
        elif not entry["has"]:
            (root / entry["path"]).unlink(missing_ok=True)
    gone = [entry for entry in decision["entries"] if not entry["has"]]
    for entry in gone:
        _remove_bytecode(root / entry["path"])
    for entry in sorted(gone, key=lambda entry: -len(entry["dirs"])):
        _remove_dirs(root, reversed(entry["dirs"]))
    _sync_parents(root, decision)


def _undo(root: Path, journal: Path) -> None:
    decision = _load(journal / "undo.json")
    for number, entry in enumerate(decision["entries"]):
        old = journal / f"old-{number}"
        untouched = (journal / f"new-{number}").exists()
        target = root / entry["path"]
        if untouched or (not entry["has"] and target.exists()):
            continue
        if not entry["had"]:
            target.unlink(missing_ok=True)
        elif old.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old, target)
    _remove_dirs(root, reversed(decision["made"]))
    _sync_parents(root, decision)


def _remove_bytecode(source: Path) -> None:
    cache = source.parent / "__pycache__"
    compiled = list(cache.glob(f"{source.stem}.*.pyc"))
    for path in compiled:
        path.unlink(missing_ok=True)
    if cache.is_dir() and not any(cache.iterdir()):
        cache.rmdir()


def _remove_dirs(root: Path, folders: Iterable[str]) -> None:
    for folder in folders:
        path = root / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _sync_parents(root: Path, decision: dict[str, Any]) -> None:
    parents = {(root / entry["path"]).parent for entry in decision["entries"]}
    for parent in parents:
        if parent.is_dir():
            _sync(parent)
