# SPDX-License-Identifier: Apache-2.0
"""Journal of a change, by which a tree is changed whole or not at all.

Everything is first written into ``.blockpatch-journal`` in the package directory: new
contents, copies of the old ones, and the hashes of both. Renaming ``redo.json`` into
place is the decision; from then on only renames, removals and directories are left, and
each of them can be repeated. A killed call leaves the journal, and the next one that
changes the tree deals with it: forward with ``redo.json``, back with ``undo.json``;
with neither nothing was changed yet.

It continues only where the release is the same and every file is as before the change
or as after it. Otherwise somebody else changed the tree in between: no file is touched,
and the change is given up.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import LockedError, TargetError, UnfinishedError, WriteError
from .lock import locked, require_unlocked, require_writable
from .plan import Change
from .target import JOURNAL, LOCK, Tree

_FORMAT = 2


@dataclass(frozen=True)
class _File:
    """One file of a change: the SHA-256 of its old and new content, None for no file.

    ``dirs``: the directories around it, outermost first; they go when empty.
    """

    path: str
    old: str | None
    new: str | None
    dirs: list[str]


@dataclass(frozen=True)
class _Interrupted:
    """Journal of a killed call.

    ``goal`` is ``new`` or ``old``, or empty where nothing was changed yet; ``files`` by
    number; ``todo`` the numbers of those that are not as the goal has them;
    ``obstacle`` says why the goal cannot be reached any more.
    """

    goal: str
    files: Sequence[_File] = ()
    todo: Sequence[int] = ()
    obstacle: str = ""


def commit(tree: Tree, changes: Sequence[Change]) -> None:
    """Carry out all the changes, or none. The lock must be held.

    Raises TargetError (read-only), WriteError (say, disk full) or LockedError (somebody
    edited a file since the changes were planned), the tree as it was.
    """
    if not changes:
        return
    for change in changes:
        parents = (tree.root / parent for parent in Path(change.path).parents)
        require_writable(next(folder for folder in parents if folder.is_dir()))
    journal = tree.root / JOURNAL
    try:
        _prepare(tree, journal, changes)
        begun = _interrupted(tree)
        if begun and not begun.obstacle:
            _carry_out(tree.root, begun)
    except BaseException as error:
        _undo(tree)
        if isinstance(error, OSError):
            raise WriteError(
                f"{_place(error) or tree.root}: {error.strerror}; "
                "all changes were undone"
            ) from error
        raise
    with _left_for_the_next_call(tree.root):
        _discard(journal)
    if begun and begun.obstacle:
        raise LockedError(
            f"{tree.root}: {begun.obstacle}, while this call was at work; "
            "nothing was written, call again"
        )


def recover(tree: Tree) -> None:
    """Finish or undo the change of a killed call. The lock must be held.

    Raises UnfinishedError, once, if somebody has changed the tree since: the change is
    given up then, and no file is touched.
    """
    left = _interrupted(tree)
    if left is None:
        return
    with _left_for_the_next_call(tree.root):
        if not left.obstacle:
            _carry_out(tree.root, left)
        _discard(tree.root / JOURNAL)
    if left.obstacle:
        raise UnfinishedError(
            f"{tree.root}: an earlier call was killed while it changed "
            f"{_names(left)}, and {left.obstacle}. That change was given up now and "
            "every file left as it is. Look at --status, then call again: --apply and "
            "--revert start from what is there"
        )


def settle(tree: Tree) -> None:
    """Take the lock and ``recover``, if a killed call left traces."""
    if any((tree.root / name).exists() for name in (JOURNAL, LOCK)):
        with locked(tree):
            recover(tree)


def pending(tree: Tree) -> str:
    """Describe the change of a killed call and how it will end; empty if there is none.

    Only reads. Raises LockedError if a call is changing the tree right now.
    """
    left = _interrupted(tree)
    require_unlocked(tree)
    if left is None or not (tree.root / JOURNAL).exists():
        return ""
    what = f"an earlier call was killed while it changed {_names(left)}"
    if left.obstacle:
        return (
            f"{what}, and {left.obstacle}; the next --apply or --revert gives that "
            "change up, leaves every file as it is, and says so"
        )
    if not left.goal:
        return (
            "an earlier call was killed before it changed anything; "
            "the next --apply or --revert clears that away"
        )
    verb = "finishes" if left.goal == "new" else "undoes"
    return f"{what}; the next --apply or --revert first {verb} that change"


def _place(error: OSError) -> str | None:
    """Return the file that an error is about; of a rename, the one that it replaces."""
    place: str | None = error.filename2 or error.filename
    return place


def _names(left: _Interrupted) -> str:
    return ", ".join(file.path for file in left.files) or "the tree"


def _interrupted(tree: Tree) -> _Interrupted | None:
    journal = tree.root / JOURNAL
    if not journal.exists():
        return None
    for goal, name in (("old", "undo.json"), ("new", "redo.json")):
        try:
            return _read(tree, goal, (journal / name).read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TargetError(f"{journal / name}: {error.strerror}") from None
    return _Interrupted("")


def _read(tree: Tree, goal: str, decision: bytes) -> _Interrupted:
    """Read the decision and compare it with the tree as it is now."""
    try:
        content = json.loads(decision)
        if content.get("format") != _FORMAT:
            why = "its journal, of another version, does not say what the files held"
            return _Interrupted(goal, obstacle=why)
        files = [_File(**file) for file in content["files"]]
        version = content["version"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return _Interrupted(goal, obstacle="its journal cannot be read")
    if version != tree.version:
        why = f"the release is {tree.version} now, no longer {version}"
        return _Interrupted(goal, files, obstacle=why)
    todo, changed = [], []
    for number, file in enumerate(files):
        now = _hash_now(tree, file.path)
        if now == getattr(file, goal):
            continue
        todo.append(number)
        if now not in (file.old, file.new) or not _stored(tree, goal, number, file):
            changed.append(file.path)
    why = f"somebody has changed {', '.join(changed)} since" if changed else ""
    return _Interrupted(goal, files, todo, why)


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _hash_now(tree: Tree, path: str) -> str | None:
    try:
        return _hash(tree.read(path))
    except TargetError:  # a link or a folder: nothing that a patch leaves
        return "unknown"


def _stored(tree: Tree, goal: str, number: int, file: _File) -> bool:
    """Return whether the journal still has the content that ``file`` is to get.

    A content that is in place is gone from the journal. If the file has its other
    content nevertheless, somebody put that back.
    """
    wanted = getattr(file, goal)
    return wanted in (None, _hash_now(tree, f"{JOURNAL}/{goal}-{number}"))


def _undo(tree: Tree) -> None:
    journal = tree.root / JOURNAL
    with _left_for_the_next_call(tree.root), contextlib.suppress(FileNotFoundError):
        os.replace(journal / "redo.json", journal / "undo.json")
    recover(tree)


@contextlib.contextmanager
def _left_for_the_next_call(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{_place(error) or root}: {error.strerror}; an interrupted change is "
            "still to be finished, the next call will try again"
        ) from error


def _discard(journal: Path) -> None:
    """Remove the journal, the decision first: the rest means nothing without it."""
    for name in ("redo.json", "undo.json"):
        (journal / name).unlink(missing_ok=True)
    if journal.exists():
        shutil.rmtree(journal)


def _prepare(tree: Tree, journal: Path, changes: Sequence[Change]) -> None:
    journal.mkdir()
    # Python runs some bytecode without a look at the source (PEP 552, unchecked). What
    # cannot be removed is an error now, while there is nothing to undo.
    for change in changes:
        _remove_bytecode(tree.root / change.path)
    files = []
    for number, change in enumerate(changes):
        target = tree.root / change.path
        if change.old is not None:
            _store(journal / f"old-{number}", change.old, like=target)
        if change.new is not None:
            _store(journal / f"new-{number}", change.new, like=target)
            if change.old is not None:
                _set_later_time(journal / f"new-{number}", target)
        hashes = _hash(change.old), _hash(change.new)
        dirs = [str(parent) for parent in Path(change.path).parents][-2::-1]
        files.append(asdict(_File(change.path, *hashes, dirs)))
    decision = {"format": _FORMAT, "version": tree.version, "files": files}
    _store(journal / "draft.json", json.dumps(decision).encode())
    _sync(journal)
    os.replace(journal / "draft.json", journal / "redo.json")
    _sync(journal)


def _store(path: Path, content: bytes, like: Path | None = None) -> None:
    """Write and fsync a file, with owner, mode and time of ``like`` if that exists."""
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
    """Advance the time: Python trusts a .pyc by the source's size and whole second."""
    second = int(target.stat().st_mtime) + 1
    later_ns = max(time.time_ns(), second * 1_000_000_000)
    os.utime(path, ns=(later_ns, later_ns))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _carry_out(root: Path, change: _Interrupted) -> None:
    """Bring every file to the goal; a repeated step does no harm."""
    for number in change.todo:
        file = change.files[number]
        target = root / file.path
        if getattr(file, change.goal) is None:
            target.unlink(missing_ok=True)
            continue
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True)
        os.replace(root / JOURNAL / f"{change.goal}-{number}", target)
    # Since then, a Python may have compiled what it imported.
    for file in change.files:
        with contextlib.suppress(OSError):
            _remove_bytecode(root / file.path)
    gone = [file for file in change.files if getattr(file, change.goal) is None]
    for folder in sorted({f for file in gone for f in file.dirs}, key=len)[::-1]:
        _remove_empty(root / folder)
    for parent in {(root / file.path).parent for file in change.files}:
        if parent.is_dir():
            _sync(parent)


def _remove_bytecode(source: Path) -> None:
    cache = source.parent / "__pycache__"
    for path in list(cache.glob(f"{source.stem}.*.pyc")):
        path.unlink(missing_ok=True)
    _remove_empty(cache)


def _remove_empty(folder: Path) -> None:
    is_own = folder.is_dir() and not folder.is_symlink()
    if is_own and not any(folder.iterdir()):
        folder.rmdir()
