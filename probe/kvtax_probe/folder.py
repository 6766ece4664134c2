# SPDX-License-Identifier: Apache-2.0
"""The folder of the records: private files, and one limit for all lives.

Whoever may write to the folder that the operator named may replace a life's folder by a
link or a folder of theirs. So no write follows a link, and none goes into a folder of
another user.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

logger = logging.getLogger("vllm.kvtax_probe")

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
LIFE = re.compile(r"\d{8}T\d{6}\.\d+Z-.+-dp\d+-\d+")
# The key of the hashes of request ids.
KEY_FILE = "request_ids.key"
# The names of what a recorder writes into a life's folder.
RECORDS = re.compile(rf"[\w.]+\.jsonl(\.1|\.new)?|{re.escape(KEY_FILE)}")
# Seconds without a write after which a life has ended: an idle one writes each 10 s.
ENDED_S = 60.0
# Seconds between two looks at the sizes.
LOOK_AGAIN_S = 5.0
READ_BYTES = 1 << 20


class LifeFolder:
    """Folder of one life of an engine, of which every file is private."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def _opened(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(PRIVATE_FOLDER)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def begin(self, name: str, header: bytes) -> tuple[int, bool]:
        """Begin a file with a header; return its descriptor, and if one was there.

        That one becomes NAME.1, in the place of an older one. Raises OSError.
        """
        with self._opened() as folder:
            new = f"{name}.new"
            descriptor = _create(folder, new)
            try:
                while header:
                    header = header[os.write(descriptor, header) :]
                was_there = True
                try:
                    os.rename(name, f"{name}.1", src_dir_fd=folder, dst_dir_fd=folder)
                except FileNotFoundError:
                    was_there = False
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.close(descriptor)
                os.unlink(new, dir_fd=folder)
                raise
        return descriptor, was_there

    def write_once(self, name: str, content: bytes) -> None:
        """Write a whole file that is not there yet. Raises OSError."""
        with self._opened() as folder:
            descriptor = _create(folder, name)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)

    def remove(self, name: str) -> bool:
        """Remove a file; return whether it was there."""
        with suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)
            return True
        return False


def _create(folder: int, name: str) -> int:
    """Create a file of this user's in a folder of this user's. Raises OSError."""
    with suppress(FileNotFoundError):
        # What a killed writer has left. A link is removed, and not what it names.
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND
    descriptor = os.open(name, flags, PRIVATE_FILE, dir_fd=folder)
    # Not the process's own id: a file server may give files of root to another user.
    if os.fstat(descriptor).st_uid != os.fstat(folder).st_uid:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
        raise PermissionError("the folder belongs to another user: name another folder")
    return descriptor


class RecordsFolder:
    """Folder of all lives, and their limit.

    Where all of it has more than the limit, the records of the oldest life that has
    ended go first. Each file of the lives that still write has an equal share.
    """

    def __init__(self, path: Path):
        self._path = path
        # Files of lives that still write, and when they were counted.
        self._living, self._looked_s = 1, 0.0

    def share(self, most_bytes: float) -> float:
        """Return how many bytes a file with its older half may have; keep the limit."""
        now_s = time.monotonic()
        if not self._looked_s or now_s > self._looked_s + LOOK_AGAIN_S:
            self._looked_s = now_s
            while self._bytes() > most_bytes:
                if not self.remove_oldest():
                    break
            ended = set(self._ended())
            files = [f for f in self._facts() if f.suffix == ".jsonl"]
            self._living = sum(file.parent not in ended for file in files)
        return most_bytes / max(self._living, 1)

    def remove_oldest(self) -> bool:
        """Remove the records of the oldest life that has ended; False without one."""
        for life in self._ended():
            files = [file for file in self._facts() if file.parent == life]
            count = sum(_records_in(file) for file in files)
            removed = [file for file in files if _is_removed(file)]
            with suppress(OSError):
                life.rmdir()
            if removed:
                logger.warning(
                    "kvtax: the records of %s are removed: the folder is full; "
                    "records lost: %d",
                    *(life, count),
                )
                return True
        return False

    def fills_disk(self) -> bool:
        """Return whether the records take at least half of their disk."""
        disk = os.statvfs(self._path)
        size = disk.f_blocks * disk.f_frsize
        return self._bytes() >= size / 2

    def _lives(self) -> list[Path]:
        """List the folders of lives, oldest first."""
        with suppress(OSError), os.scandir(self._path) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if LIFE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
        return []

    def _facts(self) -> dict[Path, os.stat_result]:
        """Return the facts of all records' files."""
        facts = {}
        for life in self._lives():
            with suppress(OSError), os.scandir(life) as entries:
                for entry in entries:
                    its = entry.stat(follow_symlinks=False)
                    if RECORDS.fullmatch(entry.name) and S_ISREG(its.st_mode):
                        facts[Path(entry.path)] = its
        return facts

    def _bytes(self) -> int:
        return sum(its.st_size for its in self._facts().values())

    def _ended(self) -> list[Path]:
        """List the lives of this user's that write no more, oldest first."""
        written: dict[Path, float] = {}
        for file, its in self._facts().items():
            if its.st_uid == os.geteuid():
                written[file.parent] = max(written.get(file.parent, 0), its.st_mtime)
        # By the clock of the disk, not of this host.
        newest_s = max(written.values(), default=0.0)
        return [life for life, at_s in written.items() if at_s < newest_s - ENDED_S]


def _is_removed(file: Path) -> bool:
    with suppress(OSError):
        file.unlink()
        return True
    return False


def _records_in(file: Path) -> int:
    """Count the lines of a file after its header."""
    if ".jsonl" not in file.name:
        return 0
    lines = 0
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            while part := os.read(descriptor, READ_BYTES):
                lines += part.count(b"\n")
        finally:
            os.close(descriptor)
    return max(lines - 1, 0)
