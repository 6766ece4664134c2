# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""JSONL files that are written while the engine serves."""

import json
import os
import threading
import time
from collections import deque
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec
from vllm.logger import init_logger
from vllm.version import __version__ as vllm_version

logger = init_logger(__name__)

FLUSH_INTERVAL_S = 0.25


def number_in_environment(name: str, otherwise: float) -> float:
    """A positive number, or `otherwise` where there is none: the engine must start."""
    told = os.environ.get(name)
    if not told:
        return otherwise
    try:
        number = float(told)
    except ValueError:
        number = 0
    if 0 < number < float("inf"):
        return number
    logger.error("%s is no positive number: taken as %s", name, otherwise)
    return otherwise


def _boot_id() -> str | None:
    """Names the kernel whose CLOCK_MONOTONIC this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class RecordFile:
    """Appends records to a JSONL file in whole lines, from a background thread.

    If the file cannot be created or written, that is logged once and records are
    dropped from then on: the engine keeps serving. With KVTAX_STEP_RECORDS_MAX_MB or
    KVTAX_STEP_RECORDS_MAX_HOURS set, a file that has half of that becomes
    NAME.jsonl.1, in the place of an older one.
    """

    def __init__(self, directory: str, name: str, header: dict):
        self.path = Path(directory) / f"{name}.jsonl"
        self._pending: deque[msgspec.Struct] = deque()
        self.append = self._pending.append
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._bytes = 0
        self._began_s = 0.0
        most_mb = number_in_environment("KVTAX_STEP_RECORDS_MAX_MB", float("inf"))
        most_hours = number_in_environment("KVTAX_STEP_RECORDS_MAX_HOURS", float("inf"))
        # A file and its older half together.
        self._most_bytes, self._most_s = most_mb * 1e6 / 2, most_hours * 3600 / 2
        self.stopped = False
        try:
            self._first_line = self._encoder.encode(
                {
                    "schema": f"kvtax.{name.partition('.')[0]}/1",
                    "clock": "CLOCK_MONOTONIC",
                    "units": {"t_ns": "ns", "*_us": "us"},
                    "vllm_version": vllm_version,
                    "pid": os.getpid(),
                    "began_ns": time.perf_counter_ns(),
                    "began_unix_ns": time.time_ns(),
                    "boot_id": _boot_id(),
                    "label": json.loads(
                        os.environ.get("KVTAX_STEP_RECORDS_LABEL", "{}")
                    ),
                    **header,
                }
            )
            self._open()
        except (OSError, ValueError):
            self._stop()
            return
        threading.Thread(target=self._run, name=f"records-{name}", daemon=True).start()
        # Unlike atexit, this also runs in the children of multiprocessing.
        Finalize(self, self.flush, exitpriority=10)

    def flush(self) -> None:
        with self._lock:
            records = [self._pending.popleft() for _ in range(len(self._pending))]
            if self.stopped or not records:
                return
            try:
                age_s = time.monotonic() - self._began_s
                if self._bytes > self._most_bytes or age_s > self._most_s:
                    self._file.close()
                    os.replace(self.path, f"{self.path}.1")
                    self._open()
                self._write(self._encoder.encode_lines(records))
            except OSError:
                self._stop()

    def _open(self) -> None:
        # "x": records of another engine are never appended to or overwritten.
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115
        self._bytes, self._began_s = 0, time.monotonic()
        self._write(self._first_line + b"\n")

    def _run(self) -> None:
        while not self.stopped:
            time.sleep(FLUSH_INTERVAL_S)
            self.flush()

    def _write(self, data: bytes) -> None:
        self._bytes += len(data)
        while data:
            data = data[self._file.write(data) :]

    def _stop(self) -> None:
        logger.exception("Cannot write %s: no step records from here on", self.path)
        # The flag as well: a record appended meanwhile must not follow a torn line.
        self.stopped = True
        self.append = lambda record: None
