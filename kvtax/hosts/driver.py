# SPDX-License-Identifier: Apache-2.0
"""The Ray driver: a process of its own, as Ray ends it if the cluster is lost.

Ray does not say so by an exception: it ends the process that asks it, at once when the
host's own part of the cluster dies, within a minute when the first host does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

from kvtax.hosts.errors import HostsError
from kvtax.hosts.progress import Progress
from kvtax.hosts.results import PlaceOf, Result, nowhere
from kvtax.proc.supervise import PR_SET_PDEATHSIG
from kvtax.signals import SIGNALS, exit_on_signals

# RESULT, or a method of Progress, with arguments.
Message = tuple[str, tuple[Any, ...]]
Say = Callable[[Message], None]

RESULT = "result"
CLOSE_S = 40.0
LOST = (
    "the Ray cluster is lost: its first host ended, or what this host has of it. "
    "--resume goes on, on another cluster"
)


def call(work: Callable[[], None]) -> None:
    """Have `work`, which is pickled, done. Raises what it raises, and HostsError if
    the cluster is lost."""
    with _messages_of(_call, work) as messages:
        list(messages)


def spread(
    address: str,
    module: str,
    files: dict[str, bytes],
    tasks: Sequence[bytes],
    alone: bool = False,
    place: PlaceOf = nowhere,
    progress: Progress | None = None,
) -> Iterator[tuple[int, str, Result]]:
    """Run kvtax.hosts.cluster.spread; raise HostsError also if the cluster is lost.

    `place` is pickled.
    """
    progress = progress or Progress()
    told = (address, module, files, tasks, alone, place)
    with _messages_of(_spread, *told) as messages:
        for what, arguments in messages:
            if what == RESULT:
                yield arguments
            else:
                getattr(progress, what)(*arguments)


@contextmanager
def _messages_of(
    target: Callable[..., None], *arguments: Any
) -> Iterator[Iterator[Message]]:
    """Yield the messages of a process that calls `target` with `arguments`.

    The iterator raises what `target` raises, and HostsError if the process has ended.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    begun = (target, theirs, os.getpid(), *arguments)
    # A daemon ends with us even if nobody closes this generator.
    process = context.Process(target=_serve, args=begun, daemon=True)
    process.start()
    theirs.close()
    try:
        yield _messages(ours)
    finally:
        process.terminate()
        process.join(CLOSE_S)
        process.kill()
        process.join()
        ours.close()


def _messages(ours: Connection) -> Iterator[Message]:
    try:
        while (message := ours.recv()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message
    except (EOFError, ConnectionResetError):
        raise HostsError(LOST) from None


def _serve(
    target: Callable[..., None], theirs: Connection, parent: int, *arguments: Any
) -> None:
    exit_on_signals()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return
    last = None
    try:
        target(theirs.send, *arguments)
    except Exception as error:
        # On its way it loses where it was raised.
        error.add_note(traceback.format_exc())
        last = error
    # What Ray does at its end must not be interrupted.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    theirs.send(last)


def _call(_: Say, work: Callable[[], None]) -> None:
    work()


def _spread(
    say: Say,
    address: str,
    module: str,
    files: dict[str, bytes],
    tasks: Sequence[bytes],
    alone: bool,
    place: PlaceOf,
) -> None:
    # Ray takes a second to import, and is needed here alone.
    from kvtax.hosts.cluster import spread as spread_here

    # It has all methods of a Progress, by __getattr__.
    remote = cast(Progress, _RemoteProgress(say))
    for result in spread_here(address, module, files, tasks, alone, place, remote):
        say((RESULT, result))


class _RemoteProgress:
    """A Progress whose methods are said."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def __getattr__(self, name: str):
        return lambda *arguments: self._say((name, arguments))
