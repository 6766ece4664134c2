# SPDX-License-Identifier: Apache-2.0
"""Files below one directory, reached without following any symbolic link.

A tree may belong to somebody else, who may change it while we work as root. So each
part of a path is opened from the part before it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from .errors import TargetError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Of what is new, whatever the umask: a server may run as another user.
FILE_MODE, FOLDER_MODE = 0o644, 0o755


def parts_of(path: str) -> tuple[str, ...]:
    """Split a path that stays below its root. Raises TargetError for any other."""
    parts = PurePosixPath(path).parts
    if not parts or "/" in parts[0] or ".." in parts or "\0" in path:
        raise TargetError(f"{path!r} leads out of the tree; nothing was changed")
    return parts


@contextmanager
def folder_of(root: Path, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the directory of `path` below `root`; yield its descriptor and the name.

    With `make`, missing directories are made. Raises TargetError for a path that leads
    elsewhere, FileNotFoundError without a directory.
    """
    *parents, name = parts_of(path)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parents):
            is_new = make and _made(part, handle)
            try:
                inner = os.open(part, _FOLDER, dir_fd=handle)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                place = root.joinpath(*parents[: number + 1])
                raise TargetError(
                    f"{place} is a symbolic link, or no directory; patch the tree that "
                    "holds the file"
                ) from None
            os.close(handle)
            handle = inner
            if is_new:
                os.fchmod(handle, FOLDER_MODE)
        yield handle, name
    finally:
        os.close(handle)


def _made(name: str, folder: int) -> bool:
    """Make a directory in an opened one; return False if it is there."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def read_below(root: Path, path: str) -> bytes | None:
    """Read a regular file below `root`; None if there is none. Raises OSError."""
    try:
        with folder_of(root, path) as (handle, name):
            return read_regular(name, os.O_NOFOLLOW, handle)
    except FileNotFoundError:
        return None


def read_regular(path: Path | str, flags: int = 0, folder: int | None = None) -> bytes:
    """Read a file. Raises OSError, also for a pipe: its reader would wait for ever."""
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return file.read()


def status_below(root: Path, path: str) -> os.stat_result | None:
    """Return the status of a file or link below `root`; None if there is none."""
    try:
        with folder_of(root, path) as (handle, name):
            return os.stat(name, dir_fd=handle, follow_symlinks=False)
    except FileNotFoundError:
        return None


def store(root: Path, path: str, content: bytes, like: os.stat_result | None) -> None:
    """Write and fsync a new file, with owner, mode and times of ``like`` if given."""
    with folder_of(root, path) as (handle, name):

        def opener(name: str, flags: int) -> int:
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(name, flags, FILE_MODE, dir_fd=handle)

        with open(name, "xb", opener=opener) as file:
            file.write(content)
            file.flush()
            if like is None:
                os.fchmod(file.fileno(), FILE_MODE)
            else:
                with suppress(PermissionError):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
                os.fchmod(file.fileno(), like.st_mode & 0o7777)
                os.utime(file.fileno(), ns=(like.st_atime_ns, like.st_mtime_ns))
            os.fsync(file.fileno())


def move(root: Path, source: str, place: Path, target: str) -> None:
    """Rename `source` below `root` to `target` below `place`, with its directories."""
    with (
        folder_of(root, source) as (from_handle, from_name),
        folder_of(place, target, make=True) as (handle, name),
    ):
        os.replace(from_name, name, src_dir_fd=from_handle, dst_dir_fd=handle)


def remove(root: Path, path: str) -> None:
    """Remove a file or link below `root`, if it is there."""
    with suppress(FileNotFoundError), folder_of(root, path) as (handle, name):
        os.unlink(name, dir_fd=handle)


def remove_empty_folders(root: Path, path: str) -> None:
    """Remove the empty directories of `path` below `root`, inner ones first."""
    parts = parts_of(path)[:-1]
    for count in range(len(parts), 0, -1):
        try:
            with folder_of(root, "/".join(parts[:count])) as (handle, name):
                if _names_in(handle, name):
                    return
                os.rmdir(name, dir_fd=handle)
        except FileNotFoundError:
            continue


def _names_in(handle: int, name: str) -> list[str]:
    inner = os.open(name, _FOLDER, dir_fd=handle)
    try:
        return os.listdir(inner)
    finally:
        os.close(inner)


def remove_matching(root: Path, folder: str, prefix: str, suffix: str) -> None:
    """Remove the files of a directory whose names begin and end so; it too if empty."""
    try:
        with folder_of(root, f"{folder}/x") as (handle, _):
            for name in os.listdir(handle):
                if name.startswith(prefix) and name.endswith(suffix):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=handle)
    except FileNotFoundError:
        return
    remove_empty_folder(root, folder)


def remove_empty_folder(root: Path, folder: str) -> None:
    """Remove one directory below `root`, if it is empty."""
    with folder_of(root, folder) as (handle, name):
        if not _names_in(handle, name):
            os.rmdir(name, dir_fd=handle)


def sync(root: Path, path: str) -> None:
    """Write the directory of `path` to the disk, if it is there."""
    with suppress(FileNotFoundError), folder_of(root, path) as (handle, _):
        os.fsync(handle)
