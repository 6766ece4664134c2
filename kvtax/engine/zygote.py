# SPDX-License-Identifier: Apache-2.0
"""A process that has imported all but vLLM, and forks a supervised command on request.

    python -m kvtax.engine.zygote SOCKET ALIVE MODULE...

The first two are file descriptors of its owner (kvtax.engine.preloaded), with which it
ends. The supervisor of a command becomes a child of the owner. The command imports vLLM
as any new process does: through its own overlay, with its own environment, arguments,
folder for temporary files, output and signals. In it, "spawn" of multiprocessing forks
too: so the engine core starts as fast as the API server. The interpreter's own
sitecustomize has run here; a command runs that of its overlay on top.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing.context
import os
import runpy
import select
import shlex
import signal
import site
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any, NoReturn

from kvtax.patcher.import_finder import MODULES
from kvtax.proc.supervise import (
    Child,
    Job,
    begin_child,
    remove_openmp_segment,
    supervise,
)


def main() -> None:
    owner, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _end_with(alive)
    for name in sys.argv[3:]:
        with suppress(Exception):
            importlib.import_module(name)
    # The forks neither look through these objects nor copy them.
    gc.collect()
    gc.freeze()
    libraries = _descriptors() - {owner.fileno(), alive}
    while descriptors := socket.recv_fds(owner, 1, 3)[1]:
        file, stdin, output = descriptors
        with os.fdopen(file) as text:
            job = Job(**json.load(text))
        if obstacle := _obstacle(job):
            answer: int | str = obstacle
        else:
            answer = _fork_supervisor(job, owner, stdin, output, libraries)
        os.close(stdin)
        os.close(output)
        owner.sendall(json.dumps(answer).encode())


def _end_with(alive: int) -> None:
    """End this process, whatever it does, when the other end of a pipe is closed."""

    def end(*_: object) -> NoReturn:
        remove_openmp_segment(os.getpid())
        os._exit(0)

    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:
        end()


def _obstacle(job: Job) -> str | None:
    """Return why a fork would not be as fresh as a new process; None if it is."""
    patched = {
        line.split()[0]
        for entry in _entries(job.env)
        if (modules := Path(entry, MODULES)).exists()
        for line in modules.read_text().splitlines()
    }
    if early := {"vllm", *patched} & sys.modules.keys():
        return f"{min(early)} is imported at each start of this Python"
    return None


def _entries(env: Mapping[str, str]) -> list[str]:
    path = env.get("PYTHONPATH")
    entries = path.split(os.pathsep) if path else []
    return list(dict.fromkeys(map(os.path.abspath, entries)))


def _fork_supervisor(
    job: Job, owner: socket.socket, stdin: int, output: int, libraries: set[int]
) -> int:
    """Fork the supervisor of `job` twice, so that it is the owner's; return its id."""
    reading, writing = os.pipe()
    if parent := os.fork():
        os.close(writing)
        with os.fdopen(reading) as text:
            pid = int(text.read())
        os.waitpid(parent, 0)
        return pid
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        remove_openmp_segment(os.getpid())
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    owner.detach()
    _set_streams(stdin, output, libraries)
    status = supervise(job, lambda masked: _fork_command(job, masked, libraries))
    remove_openmp_segment(os.getpid())
    os._exit(status)


def _fork_command(job: Job, output: int | None, libraries: set[int]) -> Child:
    if pid := os.fork():
        return Child(pid)
    begin_child()
    stdin = os.open(os.devnull, os.O_RDONLY)
    _set_streams(stdin, 1 if output is None else output, libraries)
    _run(job)
    sys.exit()


def _set_streams(stdin: int, output: int, libraries: set[int]) -> None:
    """Make these the standard streams; close what is neither that nor of a library."""
    for stream, descriptor in enumerate((stdin, output, output)):
        os.dup2(descriptor, stream)
    for descriptor in _descriptors() - libraries - {0, 1, 2}:
        os.close(descriptor)


def _descriptors() -> set[int]:
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            os.fstat(int(name))
            opened.add(int(name))
    return opened


def _run(job: Job) -> None:
    """Run `python -m module *arguments` in this process, as if it were new."""
    _, _, module, *arguments = sys.orig_argv = job.command
    inherited = {os.getcwd(), *_entries(os.environ)}
    own = [path for path in sys.path if path not in inherited]
    # Before the environment, next to which the title is.
    if setproctitle := sys.modules.get("setproctitle"):
        setproctitle.setproctitle(shlex.join(job.command))
    os.environ.clear()
    os.environ.update(job.env)
    sys.path[:] = [os.getcwd(), *_entries(os.environ), *own]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    _seed()
    multiprocessing.context.SpawnContext.Process = _ForkedAsSpawned
    _run_sitecustomize()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_sitecustomize() -> None:
    """Run the sitecustomize of the overlay, as a new process would.

    The one that the overlay's hides has run before the fork, and does not run again.
    """
    before = sys.modules.pop("sitecustomize", None)
    if before is None:
        site.execsitecustomize()
        return
    path = list(sys.path)
    overlays = [place for place in path if Path(place, MODULES).exists()]
    if overlays:
        first = path.index(overlays[0])
        # With nothing behind it, it hides none.
        sys.path[:] = overlays
        site.execsitecustomize()
        behind = [place for place in path[first:] if place not in overlays]
        sys.path[:] = [*path[:first], *sys.path, *behind]
    sys.modules["sitecustomize"] = before


def _seed() -> None:
    """Seed numpy anew; Python does it for its own generator, and torch's is fixed."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


class _ForkedAsSpawned(multiprocessing.context.SpawnProcess):
    """A process of multiprocessing that is forked, and then looks spawned."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        return popen_fork.Popen(process)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        atexit._clear()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _stop_listening()
        _seed()
        try:
            status: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
            return status
        finally:
            atexit._run_exitfuncs()


def _stop_listening() -> None:
    """Replace the parent's listening sockets: their ports are free when it ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in _descriptors():
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _listens(descriptor):
            os.dup2(null, descriptor)
    os.close(null)


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as inherited:
        return bool(inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


if __name__ == "__main__":
    main()
