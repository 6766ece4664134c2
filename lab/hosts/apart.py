# SPDX-License-Identifier: Apache-2.0
"""lab.hosts.cluster in a process of its own, which Ray ends when the cluster is lost.

Ray does not say so by an exception: it ends the process that asks it, at once when the
host's own part of the cluster dies, within a minute when the first host does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lab.hosts.errors import HostsError
from lab.hosts.place import PlaceOf, Result, at_hand
from lab.hosts.progress import Progress
from lab.serving.supervise import PR_SET_PDEATHSIG, exit_on_signals

CLOSE_S = 40.0
LOST = (
    "the Ray cluster is lost: its first host ended, or what this host has of it. "
    "--resume goes on, on another cluster"
)


def spread(
    address: str,
    module: str,
    files: dict[str, bytes],
    tasks: Sequence[bytes],
    alone: bool = False,
    place: PlaceOf = at_hand,
    progress: Progress | None = None,
) -> Iterator[tuple[int, str, Result]]:
    """As lab.hosts.cluster.spread; HostsError also if the cluster is lost.

    `place` is pickled.
    """
    progress = progress or Progress()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    told = (theirs, os.getpid(), address, module, files, tasks, alone, place)
    # A daemon ends with us even if nobody closes this generator.
    process = context.Process(target=_serve, args=told, daemon=True)
    process.start()
    theirs.close()
    try:
        while (message := _next(ours)) is not None:
            what, arguments = message
            if what == "result":
                yield arguments
            elif what == "error":
                raise HostsError(*arguments)
            else:
                getattr(progress, what)(*arguments)
    finally:
        process.terminate()
        process.join(CLOSE_S)
        process.kill()
        process.join()
        ours.close()


def _next(ours: Connection) -> tuple[str, tuple[Any, ...]] | None:
    """None after the last one. Raises HostsError if the process has ended before."""
    try:
        return ours.recv()
    except (EOFError, ConnectionResetError):
        raise HostsError(LOST) from None


class _Telling:
    """A Progress whose methods are told to `theirs`."""

    def __init__(self, theirs: Connection) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str):
        return lambda *arguments: self._theirs.send((name, arguments))


def _serve(
    theirs: Connection,
    parent: int,
    address: str,
    module: str,
    files: dict[str, bytes],
    tasks: Sequence[bytes],
    alone: bool,
    place: PlaceOf,
) -> None:
    exit_on_signals()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return
    # Ray takes a second to import, and is needed here alone.
    from lab.hosts.cluster import spread as spread_here

    try:
        telling = _Telling(theirs)
        for result in spread_here(address, module, files, tasks, alone, place, telling):
            theirs.send(("result", result))
        theirs.send(None)
    except HostsError as error:
        theirs.send(("error", error.args))
