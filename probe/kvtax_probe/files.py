# SPDX-License-Identifier: Apache-2.0
"""JSONL files that are written while the engine serves."""

from __future__ import annotations

import logging
import operator
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from .settings import MAX_BYTES, MAX_S, label

logger = logging.getLogger("vllm.kvtax_probe")

FLUSH_INTERVAL_S = 0.25
# Records that wait for a disk that hangs; then the oldest are dropped.
MOST_PENDING = 100_000
# Records that wait for a file that cannot be written; of older ones, none.
MOST_WAITING = 10_000
# Records encoded before the interpreter is given away.
BATCH = 32
# A thread that waits for the interpreter needs as long to wake up: a sleep of 0 ends
# sooner, and the interpreter is taken again.
GIVE_AWAY_S = 5e-5


def at_exit(close: Callable[[], None]) -> None:
    """Call `close` when the process ends, in the children of multiprocessing too."""
    Finalize(None, close, exitpriority=10)


def records_directory() -> Path:
    return Path(os.environ["KVTAX_STEP_RECORDS_DIR"])


def new_life(dp_rank: int) -> str:
    """Name the folder of an engine's life: start, host, data-parallel rank, pid."""
    start = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    return f"{start}-{socket.gethostname()}-dp{dp_rank}-{os.getpid()}"


class RecordFile:
    """JSONL file to which a background thread appends records in whole lines.

    While the file cannot be written, records wait, and each flush tries again; log
    lines say since when, until when, and how many are lost. A file that has half of
    what the limits allow becomes NAME.jsonl.1, in the place of an older one. A file
    whose folder was removed is begun anew. `shape` makes a record ready to be encoded,
    in the background thread.
    """

    def __init__(
        self,
        life: str,
        name: str,
        schema: str,
        header: Callable[[], dict[str, Any]] = dict,
        shape: Callable[[Any], Any] = lambda record: record,
    ):
        self.path = records_directory() / life / f"{name}.jsonl"
        self._life, self._schema, self._header = life, schema, header
        self._shape = shape
        self._pending: deque[Any] = deque(maxlen=MOST_PENDING)
        self.append = self._pending.append
        # A scheduler of its own may count in numbers that are no int, as numpy's.
        self._encoder = msgspec.json.Encoder(enc_hook=operator.index)
        self._lock = threading.Lock()
        self._descriptor = -1
        # Bytes in the file, and the lines that it could not take yet.
        self._bytes, self._unwritten = 0, b""
        self._began_s = 0.0
        # When the file could not be written, 0 if it can be; records lost since.
        self._failed_s, self._lost = 0.0, 0
        try:
            self._open()
        except Exception:
            self._note_failure()
        name = f"records-{name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def flush(self) -> None:
        """Write what is pending."""
        with self._lock:
            try:
                if self._descriptor < 0:
                    self._open()
                self._write_pending()
            except Exception:
                self._note_failure()
            else:
                if self._failed_s:
                    self._note_success()

    def _note_failure(self) -> None:
        if not self._failed_s:
            self._failed_s = time.time()
            logger.exception("kvtax: %s cannot be written; its records wait", self.path)
        while len(self._pending) > MOST_WAITING:
            self._pending.popleft()
            self._lost += 1

    def _note_success(self) -> None:
        since, now = (
            time.strftime("%H:%M:%S", time.localtime(at_s))
            for at_s in (self._failed_s, time.time())
        )
        logger.warning(
            "kvtax: %s could not be written from %s to %s; records lost: %d",
            *(self.path, since, now, self._lost),
        )
        self._failed_s, self._lost = 0.0, 0

    def _write_pending(self) -> None:
        if not (self._pending or self._unwritten):
            return
        if len(self._pending) == MOST_PENDING:
            logger.error("kvtax: %s is written too slowly: records are lost", self.path)
        self._write(b"")
        self._rotate_if_due()
        while count := min(len(self._pending), BATCH):
            batch = [self._shape(self._pending.popleft()) for _ in range(count)]
            self._write(self._encoder.encode_lines(batch))
            time.sleep(GIVE_AWAY_S)

    def _rotate_if_due(self) -> None:
        if os.fstat(self._descriptor).st_nlink == 0:
            logger.error("kvtax: %s was removed: it is begun anew", self.path)
            self._open()
            return
        age_s = time.monotonic() - self._began_s
        if self._bytes > MAX_BYTES / 2 or age_s > MAX_S / 2:
            self._open()

    def _open(self) -> None:
        """Begin the file. One that is there already becomes the older half."""
        header = self._encoder.encode(
            {
                "schema": self._schema,
                "life": self._life,
                **_header_of_process(),
                **self._header(),
            }
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = f"{self.path}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, header + b"\n")
            if self.path.exists():
                os.replace(self.path, f"{self.path}.1")
            os.replace(new, self.path)
        except OSError:
            os.close(descriptor)
            os.unlink(new)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._bytes, self._began_s = len(header) + 1, time.monotonic()

    def _run(self) -> None:
        while True:
            time.sleep(FLUSH_INTERVAL_S)
            self.flush()

    def _write(self, data: bytes) -> None:
        """Append lines, after those that could not be. Raises OSError, no line torn."""
        self._unwritten += data
        try:
            _write_all(self._descriptor, self._unwritten)
        except OSError:
            os.lseek(self._descriptor, self._bytes, os.SEEK_SET)
            os.ftruncate(self._descriptor, self._bytes)
            raise
        self._bytes += len(self._unwritten)
        self._unwritten = b""


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


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
