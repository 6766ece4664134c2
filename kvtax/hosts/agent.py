# SPDX-License-Identifier: Apache-2.0
"""A host's agent: a Ray actor, which owns the process that does the work there."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from kvtax.engine.server import tail
from kvtax.hosts.code import Code, code
from kvtax.hosts.errors import HostRefused
from kvtax.hosts.results import Place, Result, put, require_store
from kvtax.hosts.worker import PIPE, REFUSED, RESULTS, TASKS
from kvtax.proc.supervise import Supervised

WATCH_EVERY_S = 0.01
# With less, work fails in ways of its own.
LEAST_FREE_MIB = 64
# Whoever asked it every second may be gone, or cut off. Ray can take minutes to see it.
ALONE_S = 90.0
ALONE_STATUS = 1


class AgentError(Exception):
    """The host's process came to nothing; the message has the end of its log."""


class Agent:
    """Does tasks on its host by `python -m MODULE FOLDER`, as kvtax.hosts.worker says.

    `files` are put into the folder before. Whatever ends this process ends that one,
    too, and removes the folder. It ends by itself if nobody greets it for ALONE_S.
    """

    def __init__(self, module: str, files: dict[str, bytes]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvtax-host-"))
        try:
            self._fill(files)
        except OSError:
            shutil.rmtree(self._folder)
            raise
        # To open it for writing alone would wait until somebody reads.
        self._pipe = os.open(self._folder / PIPE, os.O_RDWR)
        # The folder goes with the process, but what it said last is wanted then.
        self._log_fd = os.memfd_create("log")
        self._log = Path(f"/proc/{os.getpid()}/fd/{self._log_fd}")
        command = [sys.executable, "-m", module, str(self._folder)]
        self._process = Supervised(command, dict(os.environ), self._log, self._folder)
        self._numbers = itertools.count()
        self._code = code()
        self._greeted_s = time.monotonic()
        self._closed = threading.Event()
        threading.Thread(target=self._end_when_alone, daemon=True).start()

    def _fill(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (self._folder / name).write_bytes(content)
        for name in (TASKS, RESULTS):
            (self._folder / name).mkdir()
        os.mkfifo(self._folder / PIPE)

    def greet(self) -> tuple[Code, int]:
        """Return the host's code, and how many tasks it can do at a time.

        Raises HostRefused.
        """
        self._greeted_s = time.monotonic()
        self._require_disk()
        return self._code, len(os.sched_getaffinity(0))

    def run(self, task: bytes, place: Place | None = None) -> Result:
        """Do it, and put what came out into its `place`, or hand it over without one.

        Called from several threads at once. Raises AgentError and HostRefused.
        """
        number = next(self._numbers)
        self._require_process()
        if place is not None:
            require_store(place.url, place.mark)
        (self._folder / TASKS / str(number)).write_bytes(task)
        os.write(self._pipe, f"{number}\n".encode())
        result = self._folder / RESULTS / str(number)
        while not result.exists():
            self._require_process()
            time.sleep(WATCH_EVERY_S)
        # What failed may have failed for that, and said something else.
        self._require_disk()
        delivered = put(result, place)
        shutil.rmtree(result)
        return delivered

    def _require_disk(self) -> None:
        """Raise HostRefused if the disk is full."""
        free_mib = shutil.disk_usage(tempfile.gettempdir()).free / 2**20
        if free_mib < LEAST_FREE_MIB:
            raise HostRefused(
                f"its disk is full: {free_mib:.0f} MiB free in {tempfile.gettempdir()}"
            )

    def _require_process(self) -> None:
        """Raise AgentError or HostRefused if the process has ended."""
        if (status := self._process.poll()) is None:
            return
        self._require_disk()
        self._process.stop()
        if status == REFUSED:
            raise HostRefused(self._log.read_text().strip())
        raise AgentError(tail(self._log))

    def _end_when_alone(self) -> None:
        while (left_s := self._greeted_s + ALONE_S - time.monotonic()) > 0:
            if self._closed.wait(left_s):
                return
        self._process.stop()
        os._exit(ALONE_STATUS)

    def close(self) -> None:
        self._closed.set()
        self._process.stop()
        os.close(self._pipe)
        os.close(self._log_fd)
