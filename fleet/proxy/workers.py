# SPDX-License-Identifier: Apache-2.0
"""Several worker processes: started, replaced when they die, and ended with us.

They are forked, so that they share what was made before. One that dies loses the
requests that it had; the others go on, and its part of the shared loads is cleared.
None outlives us, however we end.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection, wait

from lab.serving.supervise import PR_SET_PDEATHSIG

from .http.server import BACKLOG
from .shared import Seat, Shared

# Longer than a worker takes that tells its clients, and waits for slow ones.
STOP_S = 15.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_fork = multiprocessing.get_context("fork")
_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)
# Serves until SIGINT or SIGTERM, calls its second argument once it does, and returns
# the exit status.
Serve = Callable[[Seat, Callable[[], None]], int]


class _Worker:
    """A running worker; `serves` once it has said so."""

    def __init__(self, seat: Seat, serve: Serve) -> None:
        self.place, self.number = seat.place, seat.number
        self.serves = False
        self.news, said = _fork.Pipe(duplex=False)
        self.process = _fork.Process(target=_work, args=(serve, seat, said))
        self.process.start()
        said.close()

    def listen(self) -> None:
        """To what it has said, if anything."""
        while not self.serves and self.news.poll():
            try:
                self.serves = self.news.recv()
            except EOFError:
                return


def listening(host: str, port: int, workers: int) -> list[socket.socket]:
    """A socket for each worker, among which the kernel spreads what connects.

    They are ours: what waits at the socket of one that dies waits for the next one.
    Raises OSError, also if the port is another's that would share it.
    """
    family, *_, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.create_server(where, family=family) as alone:
        where = alone.getsockname()
    several = {"family": family, "backlog": BACKLOG, "reuse_port": True}
    return [socket.create_server(where, **several) for _ in range(workers)]


def keep(
    workers: int, shared: Shared, serve: Serve, serving: Callable[[], None]
) -> int:
    """Keep that many running until SIGINT or SIGTERM; the exit status.

    Calls `serving` once all of them serve. One that ends before it does is not
    replaced: the others are ended too.
    """
    numbers = count()
    running: list[_Worker] = []

    def started(place: int) -> _Worker:
        return _Worker(Seat(shared, place, next(numbers)), serve)

    with _signalled() as told:
        try:
            # The first one alone: what it cannot do, none can, and once is enough said.
            running.append(started(0))
            announced = False
            while not _heard(told, running):
                for one in running:
                    if one.process.exitcode is None:
                        continue
                    if not one.serves:
                        return max(1, one.process.exitcode)  # < 0: by a signal
                    what = "worker %d ended (%s) and is replaced"
                    log.warning(what, one.number, one.process.exitcode)
                    shared.clear(one.place)
                    running[one.place] = started(one.place)
                if not all(one.serves for one in running):
                    continue
                running += map(started, range(len(running), workers))
                if not announced and all(one.serves for one in running):
                    announced = True
                    serving()
            return 0
        finally:
            _stop([one.process for one in running])


def _heard(told: socket.socket, running: list[_Worker]) -> bool:
    """Wait until something has happened to us or a worker; whether we shall stop."""
    ends = [one.process.sentinel for one in running]
    news = [one.news for one in running if not one.serves]
    heard = wait([told, *ends, *news])
    for one in running:
        one.listen()
    return told in heard


def _work(serve: Serve, seat: Seat, said: Connection) -> None:
    """A worker's life. It gets signals of its own, and dies with the process that
    forked it.
    """
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != multiprocessing.parent_process().pid:
        return
    sys.exit(serve(seat, lambda: said.send(True)))


def _stop(processes: list[multiprocessing.process.BaseProcess]) -> None:
    for one in processes:
        one.terminate()
    deadline = time.monotonic() + STOP_S
    for one in processes:
        one.join(max(0.0, deadline - time.monotonic()))
    for one in processes:
        one.kill()
        one.join()


@contextmanager
def _signalled() -> Iterator[socket.socket]:
    """A socket that can be read from once we have been told to stop."""
    told, tells = socket.socketpair()
    with told, tells:
        tells.setblocking(False)
        signal.set_wakeup_fd(tells.fileno())
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        yield told
        signal.set_wakeup_fd(-1)
