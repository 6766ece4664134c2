# SPDX-License-Identifier: Apache-2.0
"""Several worker processes: start, replace and end them, and let each speak for all.

Workers are forks of one process, so that they share what was made before. A worker that
dies loses its requests; the others go on, and its part of the shared loads is cleared.
No worker outlives the parent, however that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgspec
from kvtax.proc.supervise import PR_SET_PDEATHSIG
from multidict import CIMultiDict

from .http_client import Pool
from .http_server import BACKLOG, Handle, answering
from .loads import Seat, Shared
from .metrics import Counts

# Seconds for a worker to end, after the time for the requests under way: more than it
# takes to send its clients their errors, slow ones too.
STOP_S = 15.0
# Seconds for another worker's answer.
PEER_TIMEOUT_S = 1.0
_LOOPBACK = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_fork = multiprocessing.get_context("fork")
_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)
# Serves until SIGINT or SIGTERM; calls its second argument once it serves.
Serve = Callable[[Seat, Callable[[], None]], None]


class WorkerError(Exception):
    """A worker ended before it served."""

    exit_code = 3


class _Worker:
    """A running worker; `serves` once it has reported so, `error` if it cannot."""

    def __init__(self, seat: Seat, serve: Serve) -> None:
        self.place, self.number = seat.place, seat.number
        self.serves = False
        self.error: Exception | None = None
        self.news, reports = _fork.Pipe(duplex=False)
        self.process = _fork.Process(target=_work, args=(serve, seat, reports))
        self.process.start()
        reports.close()

    def listen(self) -> None:
        """Read the worker's report, if there is one."""
        while not self.serves and self.news.poll():
            try:
                self.error = self.news.recv()
            except EOFError:
                return
            self.serves = self.error is None

    def failure(self) -> Exception:
        """Return the reason why the worker ended before it served."""
        status = self.process.exitcode
        return self.error or WorkerError(
            f"worker {self.number} ended with status {status} before it served; see "
            "its log above"
        )


def listening(host: str, port: int, workers: int) -> list[socket.socket]:
    """Open a socket for each worker, among which the kernel spreads connections.

    The parent holds them: connections that wait for a worker that dies wait for its
    successor. Raises OSError, also if the port is another process's that shares it.
    """
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.create_server(address, family=family) as alone:
        address = alone.getsockname()
    return [
        socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=True)
        for _ in range(workers)
    ]


def keep(
    shared: Shared,
    serve: Serve,
    announce: Callable[[], None],
    sockets: list[socket.socket],
    stop_s: float,
) -> int:
    """Keep a worker for each of `sockets` running until SIGINT or SIGTERM.

    Returns the signal's number. Signals are passed on to the workers, which have
    `stop_s` seconds to end. Calls `announce` once all of them serve. A worker that ends
    before it serves is not replaced: the others are ended, and its failure is raised.
    """
    workers = len(sockets)
    numbers = count()
    running: list[_Worker] = []

    def start(place: int) -> _Worker:
        return _Worker(Seat(shared, place, next(numbers)), serve)

    number: int | None = None
    with _signals() as signals:
        try:
            # Alone at first: where one worker cannot serve, none can.
            running.append(start(0))
            announced = False
            while (number := _wait(signals, running)) is None:
                for worker in running:
                    if worker.process.exitcode is None:
                        continue
                    if not worker.serves:
                        raise worker.failure()
                    message = "worker %d ended (%s) and is replaced"
                    log.warning(message, worker.number, worker.process.exitcode)
                    shared.clear(worker.place)
                    running[worker.place] = start(worker.place)
                if not all(worker.serves for worker in running):
                    continue
                running += map(start, range(len(running), workers))
                if not announced and all(worker.serves for worker in running):
                    announced = True
                    announce()
            return number
        finally:
            for bound in sockets:
                bound.close()
            processes = [worker.process for worker in running]
            _stop(processes, number or signal.SIGINT, signals, stop_s)


def _wait(signals: socket.socket, running: list[_Worker]) -> int | None:
    """Wait for a signal or a worker's news; return the signal's number, if one came."""
    ends = [worker.process.sentinel for worker in running]
    news = [worker.news for worker in running if not worker.serves]
    ready = wait([signals, *ends, *news])
    for worker in running:
        worker.listen()
    return signals.recv(1)[0] if signals in ready else None


def _work(serve: Serve, seat: Seat, reports: Connection) -> None:
    """Run a worker. It handles signals itself, and dies with its parent."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        return
    try:
        serve(seat, lambda: reports.send(None))
    except Exception as error:
        if not isinstance(error, OSError) and not hasattr(error, "exit_code"):
            raise
        # The parent raises it, so that all errors reach the user by one way.
        reports.send(error)
        sys.exit(1)


def _stop(
    processes: Sequence[BaseProcess],
    number: int,
    signals: socket.socket,
    limit_s: float,
) -> None:
    """Pass the signal on, SIGINT for any more, and kill what is left after `limit_s`.

    A worker that is busy would take two SIGTERMs for one.
    """
    deadline = time.monotonic() + limit_s
    passed_on = number
    while alive := [process for process in processes if process.is_alive()]:
        if passed_on:
            for process in alive:
                with suppress(ProcessLookupError):
                    os.kill(process.pid or 0, passed_on)
        left_s = deadline - time.monotonic()
        ready = wait([signals, *(process.sentinel for process in alive)], left_s)
        if not ready:
            break
        passed_on = signal.SIGINT if signals in ready and signals.recv(1) else 0
    for process in processes:
        process.kill()
        process.join()


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket from which the number of each signal can be read."""
    reads, writes = socket.socketpair()
    with reads, writes:
        writes.setblocking(False)
        signal.set_wakeup_fd(writes.fileno())
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        yield reads
        signal.set_wakeup_fd(-1)


class Peers:
    """The other workers of the proxy; there are none without a `seat`.

    Each answers the others at a port of its own on the loopback interface, which is in
    the shared memory. A worker's counts are lost when it dies.
    """

    def __init__(self, seat: Seat | None, pool: Pool) -> None:
        self._seat = seat
        self._pool = pool

    @property
    def authorization(self) -> str | None:
        """The header that the workers know each other by."""
        return None if self._seat is None else self._seat.shared.authorization

    @asynccontextmanager
    async def answered(self, handle: Handle) -> AsyncIterator[None]:
        """Answer the other workers inside the context. Raises OSError."""
        if self._seat is None:
            yield
            return
        ports, place = self._seat.shared.ports, self._seat.place
        async with answering(handle, _LOOPBACK, 0) as port:
            ports[place] = port
            try:
                yield
            finally:
                ports[place] = 0

    async def counts(self) -> list[Counts]:
        """Request the counts of each other worker."""
        return [
            msgspec.json.decode(answer, type=Counts)
            for answer in await self._request_all("/counts")
        ]

    async def decisions(self) -> list[bytes]:
        """Request the lines of the other workers' last decisions."""
        return [
            line
            for answer in await self._request_all("/decisions")
            for line in answer.splitlines()
        ]

    async def _request_all(self, path: str) -> list[bytes]:
        """Return the answers of the workers that give one."""
        if self._seat is None:
            return []
        ports = self._seat.shared.ports.tolist()
        ports[self._seat.place] = 0
        urls = [f"http://{_LOOPBACK}:{port}" for port in ports if port]
        answers = await asyncio.gather(*(self._request(url, path) for url in urls))
        return [answer for answer in answers if answer is not None]

    async def _request(self, url: str, path: str) -> bytes | None:
        """Return None if the worker is ending, or too busy."""
        headers = CIMultiDict({"Authorization": str(self.authorization)})
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                answer = await self._pool.request("GET", url, path, headers)
                try:
                    return await answer.read()
                finally:
                    answer.close()
        except OSError as error:  # a TimeoutError is one
            log.warning("the worker at %s: %r", url, error)
            return None
