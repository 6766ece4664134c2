# SPDX-License-Identifier: Apache-2.0
"""Journal of a change, by which a tree is changed whole or not at all.

Everything is first written into ``.blockpatch-journal`` in the package directory: the
new contents, copies of the old ones, and the hashes of both. Renaming ``change.json``
into place begins the change. A killed call leaves it there, and the next call that
changes the tree compares every file with the hashes: if all are new the change is
whole, else the old files are put back. A journal without ``change.json`` has changed
nothing.

Where the release is another one now, or a file is neither old nor new, somebody else
has changed the tree in between: no file is touched, and the change is given up.

A tree may come from somebody else, its journal too: only a directory of this user, that
nobody else can write, is read, and no path in it leads out of the tree.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .below import (
    folder_of,
    move,
    parts_of,
    read_below,
    remove,
    remove_empty_folders,
    remove_matching,
    status_below,
    store,
    sync,
)
from .errors import LockedError, TargetError, UnfinishedError, WriteError
from .lock import locked, require_unlocked, require_writable
from .plan import Plan
from .record import updated_record, write_record
from .target import JOURNAL, LOCK, Tree

_FORMAT = 3
_CHANGE = f"{JOURNAL}/change.json"
_OTHERS = 0o077


@dataclass(frozen=True)
class _File:
    """One file of a change: SHA-256 of its old and new content, None for no file."""

    path: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class _Interrupted:
    """Journal of a killed call.

    ``files`` are empty where nothing was changed yet; of ``added`` the RECORD has a
    line. ``is_whole``: all files are new. ``obstacle`` says why neither all old nor all
    new files can be had any more.
    """

    files: Sequence[_File] = ()
    added: Sequence[str] = ()
    is_whole: bool = False
    obstacle: str = ""


def commit(tree: Tree, plan: Plan) -> str:
    """Carry out a plan, or nothing of it. The lock must be held.

    Returns a note where the change is whole, but its journal could not be removed.
    Raises TargetError (read-only), WriteError (say, disk full) or LockedError (somebody
    edited a file since the changes were planned), the tree as it was.
    """
    if not plan.changes and not _lacks_record(tree, plan):
        return ""
    for change in plan.changes:
        parents = (tree.root / parent for parent in Path(change.path).parents)
        require_writable(next(folder for folder in parents if folder.is_dir()))
    try:
        files = _prepare(tree, plan)
        _bring(tree, files, plan.added, to_new=True)
    except BaseException as error:
        _end(tree, undo=True)
        if isinstance(error, OSError):
            raise WriteError(
                f"{error.filename2 or error.filename or tree.root}: {error.strerror}; "
                "all changes were undone"
            ) from error
        raise
    try:
        _discard(tree)
    except OSError as error:
        return (
            f"the change is whole; {JOURNAL} stays ({error.strerror}), and the next "
            "call removes it"
        )
    return ""


def _lacks_record(tree: Tree, plan: Plan) -> bool:
    there = [path for path in plan.added if status_below(tree.root, path)]
    return updated_record(tree, plan.added, there) is not None


def recover(tree: Tree) -> None:
    """End the change of a killed call. The lock must be held.

    Raises UnfinishedError, once, if somebody has changed the tree since: the change is
    given up then, and no file is touched.
    """
    left = _end(tree)
    if left and left.obstacle:
        raise UnfinishedError(
            f"{tree.root}: an earlier call was killed while it changed "
            f"{_names(left)}, and {left.obstacle}. That change was given up now and "
            "every file left as it is. Look at --status, then call again: --apply and "
            "--revert start from the files as they are"
        )


def _end(tree: Tree, undo: bool = False) -> _Interrupted | None:
    """End a change and remove its journal; with `undo` put the old files back."""
    left = _interrupted(tree)
    if left is None:
        return None
    try:
        if left.files and not left.obstacle:
            to_new = left.is_whole and not undo
            _bring(tree, left.files, left.added, to_new)
        _discard(tree)
    except OSError as error:
        raise WriteError(
            f"{error.filename2 or error.filename or tree.root}: {error.strerror}; an "
            "interrupted change is still to be ended, the next call will try again"
        ) from error
    return left


def settle(tree: Tree) -> None:
    """Take the lock and ``recover``, if a killed call left traces."""
    if any(os.path.lexists(tree.root / name) for name in (JOURNAL, LOCK)):
        with locked(tree):
            recover(tree)


def pending(tree: Tree) -> str:
    """Describe the change of a killed call and how it will end; empty without one.

    Only reads. Raises LockedError if a call is changing the tree right now.
    """
    left = _interrupted(tree)
    require_unlocked(tree)
    if left is None or not (tree.root / JOURNAL).exists():
        return ""
    ending = f"an earlier call was killed while it changed {_names(left)}"
    if left.obstacle:
        return (
            f"{ending}, and {left.obstacle}; the next --apply or --revert gives that "
            "change up, leaves every file as it is, and reports it"
        )
    if not left.files or left.is_whole:
        when = "after it had changed everything" if left.files else "before any change"
        return f"an earlier call was killed {when}; the next --apply or --revert tidies"
    return f"{ending}; the next --apply or --revert first undoes that change"


def _names(left: _Interrupted) -> str:
    return ", ".join(file.path for file in left.files) or "the tree"


def _interrupted(tree: Tree) -> _Interrupted | None:
    """Read the journal. Raises TargetError for one that this user did not write."""
    status = status_below(tree.root, f"{JOURNAL}")
    if status is None:
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
    if not (is_own and stat.S_ISDIR(status.st_mode)):
        raise TargetError(
            f"{tree.root / JOURNAL} was not written by this user's call (owner "
            f"{status.st_uid}, mode {status.st_mode & 0o7777:o}); nothing was changed. "
            "Call as its owner, or remove it if the tree is whole"
        )
    try:
        text = read_below(tree.root, _CHANGE)
    except OSError as error:
        raise TargetError(f"{tree.root / _CHANGE}: {error.strerror}") from None
    return _Interrupted() if text is None else _read(tree, text)


def _read(tree: Tree, text: bytes) -> _Interrupted:
    """Read the change and compare it with the tree as it is now."""
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            return _Interrupted(obstacle="its journal is of another version of kvtax")
        files = [_File(**file) for file in content["files"]]
        added, version = [*map(str, content["added"])], content["version"]
        for path in (*added, *(file.path for file in files)):
            parts_of(path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _Interrupted(obstacle="its journal cannot be read")
    if version != tree.version:
        why = f"the release is {tree.version} now, no longer {version}"
        return _Interrupted(files, obstacle=why)
    now = [_hash_now(tree, file.path) for file in files]
    changed = [
        file.path
        for number, file in enumerate(files)
        if now[number] not in (file.old, file.new)
        or (now[number] != file.old and not _is_stored(tree, number, file))
    ]
    is_whole = all(is_now == file.new for is_now, file in zip(now, files, strict=True))
    why = f"somebody has changed {', '.join(changed)} since" if changed else ""
    return _Interrupted(files, added, is_whole, "" if is_whole else why)


def _is_stored(tree: Tree, number: int, file: _File) -> bool:
    """Return whether the journal still has the old content of a file."""
    return file.old in (None, _hash_now(tree, f"{JOURNAL}/old-{number}"))


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _hash_now(tree: Tree, path: str) -> str | None:
    try:
        return _hash(read_below(tree.root, path))
    except (OSError, TargetError):  # a link or a folder: nothing that a patch leaves
        return "unknown"


def _require_old(tree: Tree, files: Sequence[_File]) -> None:
    for file in files:
        if _hash_now(tree, file.path) != file.old:
            raise LockedError(
                f"{tree.root}: somebody has changed {file.path} while this call was at "
                "work; nothing was written, call again"
            )


def _discard(tree: Tree) -> None:
    """Remove the journal, its change first: the rest means nothing without it."""
    remove(tree.root, _CHANGE)
    with contextlib.suppress(FileNotFoundError), folder_of(tree.root, JOURNAL) as place:
        shutil.rmtree(JOURNAL, dir_fd=place[0])


def _prepare(tree: Tree, plan: Plan) -> list[_File]:
    root = tree.root
    with folder_of(root, JOURNAL) as (handle, name):
        os.mkdir(name, 0o700, dir_fd=handle)
    # Python runs some bytecode without a look at the source (PEP 552, unchecked). What
    # cannot be removed is an error now, while there is nothing to undo.
    for change in plan.changes:
        _remove_bytecode(root, change.path)
    files = []
    for number, change in enumerate(plan.changes):
        like = status_below(root, change.path) if change.old is not None else None
        if change.old is not None:
            store(root, f"{JOURNAL}/old-{number}", change.old, like)
        if change.new is not None:
            store(root, f"{JOURNAL}/new-{number}", change.new, like)
        if change.new is not None and like is not None:
            _set_later_time(root / JOURNAL / f"new-{number}", like.st_mtime)
        files.append(_File(change.path, _hash(change.old), _hash(change.new)))
    content = {
        "format": _FORMAT,
        "version": tree.version,
        "added": plan.added,
        "files": [asdict(file) for file in files],
    }
    store(root, f"{JOURNAL}/draft.json", json.dumps(content).encode(), like=None)
    sync(root, _CHANGE)
    _require_old(tree, files)
    move(root, f"{JOURNAL}/draft.json", root, _CHANGE)
    sync(root, _CHANGE)
    return files


def _set_later_time(path: Path, time_s: float) -> None:
    """Advance the time: Python trusts a .pyc by the source's size and whole second."""
    later_ns = max(time.time_ns(), (int(time_s) + 1) * 1_000_000_000)
    os.utime(path, ns=(later_ns, later_ns), follow_symlinks=False)


def _bring(
    tree: Tree, files: Sequence[_File], added: Sequence[str], to_new: bool
) -> None:
    """Bring every file to its new or old content; a repeated step does no harm."""
    goal = "new" if to_new else "old"
    root = tree.root
    for number, file in enumerate(files):
        wanted = file.new if to_new else file.old
        if _hash_now(tree, file.path) == wanted:
            continue
        if wanted is None:
            remove(root, file.path)
        else:
            move(root, f"{JOURNAL}/{goal}-{number}", root, file.path)
    for file in files:
        # Since then, a Python may have compiled what it imported.
        with contextlib.suppress(OSError, TargetError):
            _remove_bytecode(root, file.path)
        if (file.new if to_new else file.old) is None:
            remove_empty_folders(root, file.path)
        sync(root, file.path)
    write_record(tree, added)


def _remove_bytecode(root: Path, path: str) -> None:
    """Remove the bytecode of a source, also where this Python keeps it elsewhere."""
    source = Path(path)
    for place, folder in _bytecode_folders(root, source):
        remove_matching(place, folder, f"{source.stem}.", ".pyc")


def _bytecode_folders(root: Path, source: Path) -> Iterator[tuple[Path, str]]:
    yield root, str(source.parent / "__pycache__")
    if (prefix := sys.pycache_prefix) and Path(prefix).is_dir():
        yield Path(prefix), str(Path(*root.parts[1:]) / source.parent)
