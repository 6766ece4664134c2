# SPDX-License-Identifier: Apache-2.0
"""JSONL files that are written while the engine serves."""

from __future__ import annotations

import errno
import logging
import operator
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from .folder import LifeFolder, RecordsFolder
from .settings import MAX_BYTES, MAX_S, label

logger = logging.getLogger("vllm.kvtax_probe")

FLUSH_INTERVAL_S = 0.25
# Records that wait for a disk that hangs; then the oldest are dropped.
MOST_PENDING = 100_000
# Records that wait for a file that cannot be written; of older ones, none.
MOST_WAITING = 10_000
# Records encoded before the interpreter is given away, and bytes that are written at
# once: a slow disk takes as long for a few.
BATCH, WRITE_BYTES = 32, 1 << 18
# A thread that waits for the interpreter needs as long to wake up: a sleep of 0 ends
# sooner, and the interpreter is taken again.
GIVE_AWAY_S = 5e-5
# Between two messages about records that are lost.
SAY_AGAIN_S = 60.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def at_exit(close: Callable[[], None]) -> None:
    """Call `close` when the process ends, in the children of multiprocessing too."""
    Finalize(None, close, exitpriority=10)


def records_directory() -> Path:
    """Return the folder of all lives."""
    return Path(os.environ["KVTAX_STEP_RECORDS_DIR"])


def new_life(dp_rank: int) -> str:
    """Name the folder of an engine's life: start, host, data-parallel rank, pid."""
    start = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    return f"{start}-{socket.gethostname()}-dp{dp_rank}-{os.getpid()}"


class RecordFile:
    """JSONL file to which a background thread appends records in whole lines.

    While the file cannot be written, records wait, and each flush tries again. A file
    with half of its share of the folder's limit becomes NAME.jsonl.1, in the place of
    an older one. A file that was moved, removed or truncated is begun anew. Records
    that are lost are counted: log lines and the next header say how many. `shape`
    makes a record ready to be encoded, in the background thread.
    """

    def __init__(
        self,
        life: str,
        name: str,
        schema: str,
        header: Callable[[], dict[str, Any]] = dict,
        shape: Callable[[Any], Any] = lambda record: record,
    ):
        self._folder = LifeFolder(records_directory() / life)
        self.path = self._folder.path / f"{name}.jsonl"
        self._life, self._schema, self._header = life, schema, header
        self._shape = shape
        self._pending: deque[Any] = deque()
        self.append = self._pending.append
        # A scheduler of its own may count in numbers that are no int, as numpy's.
        self._encoder = msgspec.json.Encoder(enc_hook=operator.index)
        self._lock = threading.Lock()
        self._descriptor, self._pid = -1, os.getpid()
        # Bytes in the file, and the lines that it could not take yet.
        self._bytes, self._unwritten = 0, b""
        # Records in the file, in its older half and among the unwritten lines.
        self._records = self._older_records = self._unwritten_records = 0
        self._began_s = 0.0
        # When the file could not be written, 0 if it can be.
        self._failed_s = 0.0
        # Records lost in all, and when and of how many a message told last.
        self._lost, self._said_lost, self._said_s = 0, 0, 0.0
        with self._lock:
            self._try(self._open)
        name = f"records-{name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        _watch(self)

    def flush(self) -> None:
        """Write what is pending, unless this is a fork: the file is its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._try(self._write_pending)

    def shed(self) -> None:
        """Drop the oldest of more pending records than may wait."""
        while len(self._pending) > MOST_PENDING:
            self._drop_pending()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            if not self._failed_s:
                self._failed_s = time.time()
                logger.exception(
                    "kvtax: %s cannot be written; its records wait", self.path
                )
            while len(self._pending) > MOST_WAITING:
                self._drop_pending()
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                with suppress(OSError):
                    self._make_room()
        else:
            self._say_lost()

    def _say_lost(self) -> None:
        """Log how many records are lost, and when the file could not be written."""
        lost, now_s = self._lost - self._said_lost, time.time()
        if self._failed_s:
            since, until = (
                time.strftime("%H:%M:%S", time.localtime(at_s))
                for at_s in (self._failed_s, now_s)
            )
            logger.warning(
                "kvtax: %s could not be written from %s to %s; records lost: %d",
                *(self.path, since, until, lost),
            )
        elif lost and now_s > self._said_s + SAY_AGAIN_S:
            logger.warning(
                "kvtax: %s is written too slowly, or its limit is too small for a "
                "flush; records lost: %d",
                *(self.path, lost),
            )
        else:
            return
        self._failed_s, self._said_lost, self._said_s = 0.0, self._lost, now_s

    def _drop_pending(self) -> None:
        with suppress(IndexError):
            self._pending.popleft()
            self._lost += 1

    def _write_pending(self) -> None:
        if self._descriptor < 0:
            self._open()
        if not (self._pending or self._unwritten):
            return
        self._begin_anew_if_gone()
        # Those that come meanwhile are for the next flush.
        count = len(self._pending)
        if self._unwritten:
            self._write()
        while count > 0:
            self._rotate_if_due()
            while count > 0 and len(self._unwritten) < WRITE_BYTES:
                count -= self._encode(min(count, BATCH))
                time.sleep(GIVE_AWAY_S)
            self._write()

    def _encode(self, count: int) -> int:
        """Encode so many records, fewer if some were dropped; return `count`."""
        batch: list[Any] = []
        with suppress(IndexError):
            while len(batch) < count:
                batch.append(self._shape(self._pending.popleft()))
        self._unwritten += self._encoder.encode_lines(batch)
        self._unwritten_records += len(batch)
        return count

    def _begin_anew_if_gone(self) -> None:
        """Begin the file anew if its path is another file's by now, or none's."""
        own = os.fstat(self._descriptor)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            gone = "was removed or moved"
        else:
            is_own = (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
            gone = "" if is_own else "was replaced by another file"
        if not gone and own.st_size < self._bytes:
            gone = "was truncated"
            self._folder.remove(self.path.name)
        if gone:
            logger.error("kvtax: %s %s: it is begun anew", self.path, gone)
            self._open()

    def _rotate_if_due(self) -> None:
        age_s = time.monotonic() - self._began_s
        half = _records_folder().share(MAX_BYTES) / 2
        due = self._bytes + min(len(self._unwritten), WRITE_BYTES) > half
        if (due and self._records) or age_s > MAX_S / 2:
            self._open()

    def _open(self) -> None:
        """Begin the file. The own one that is there becomes the older half."""
        header = self._encoder.encode(
            {
                "schema": self._schema,
                "life": self._life,
                **_header_of_process(),
                **self._header(),
                "lost": self._lost + self._older_records,
            }
        )
        descriptor, was_there = self._folder.begin(self.path.name, header + b"\n")
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        if was_there:
            # That an older half goes is no accident: no message says so.
            self._lost += self._older_records
            self._said_lost += self._older_records
            self._older_records = self._records
        self._records = 0
        self._bytes, self._began_s = len(header) + 1, time.monotonic()

    def _make_room(self) -> None:
        """Remove what is oldest from a full disk: other lives, then the own records."""
        folder = _records_folder()
        if folder.remove_oldest():
            return
        if self._folder.remove(f"{self.path.name}.1"):
            self._lost += self._older_records
            self._older_records = 0
        elif folder.fills_disk() and self._records:
            self._folder.remove(self.path.name)
            self._lost += self._records
            self._records = 0
            os.close(self._descriptor)
            self._descriptor = -1

    def _run(self) -> None:
        while True:
            time.sleep(FLUSH_INTERVAL_S)
            self.flush()

    def _write(self) -> None:
        """Append the unwritten lines. Raises OSError, no line torn."""
        try:
            _write_all(self._descriptor, self._unwritten)
        except OSError:
            os.ftruncate(self._descriptor, self._bytes)
            raise
        self._bytes += len(self._unwritten)
        self._records += self._unwritten_records
        self._unwritten, self._unwritten_records = b"", 0


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


_folders: dict[Path, RecordsFolder] = {}


def _records_folder() -> RecordsFolder:
    path = records_directory()
    return _folders.setdefault(path, RecordsFolder(path))


_watched: list[RecordFile] = []


def _watch(file: RecordFile) -> None:
    """Have a thread drop what waits for a disk that hangs, and so does the writer."""
    _watched.append(file)
    if len(_watched) == 1:
        name = "records-waiting"
        threading.Thread(target=_shed_all, name=name, daemon=True).start()


def _shed_all() -> None:
    while True:
        time.sleep(FLUSH_INTERVAL_S)
        for file in list(_watched):
            file.shed()


def _header_of_process() -> dict[str, Any]:
    from vllm.version import __version__ as vllm_version

    return {
        "clock": "CLOCK_MONOTONIC",
        "units": {"t_ns": "ns", "*_us": "us"},
        "vllm_version": vllm_version,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began_ns": time.perf_counter_ns(),
        "began_unix_ns": time.time_ns(),
        "boot_id": _boot_id(),
        "label": label(),
    }


def _boot_id() -> str | None:
    """Return the id of the running kernel, whose CLOCK_MONOTONIC this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
