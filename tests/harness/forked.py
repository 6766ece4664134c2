# SPDX-License-Identifier: Apache-2.0
"""`python -m MODULE ...` as a fork of a process that has imported what it imports.

For what tests start by the hundred: a fork takes a tenth of a start's CPU time.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy

from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import adopt_orphans

# By module, what it imports; never itself, as it runs as __main__.
IMPORTS = {
    "kvtax": [
        "kvtax_fleet.cli.proxy",
        "kvtax_fleet.cli.fleet",
        "kvtax_fleet.proxy.service",
        "kvtax_fleet.replay.replayer",
    ],
    "tests.harness.standin.server": [
        "kvtax_fleet.records.exposition",
        "tests.harness.standin.messages",
        "tests.harness.standin.standin_engine",
        "tests.harness.standin.transfer",
    ],
}


class Forked(subprocess.Popen):
    """A Popen of `[sys.executable, "-m", MODULE, ...]` for a MODULE of IMPORTS."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Have the command forked, with what subprocess made its standard streams."""
        _, _, _, _, cwd, env, _, _, _, *pipes = rest[:15]
        stdin, _, _, stdout, _, stderr = pipes
        ends = enumerate((stdin, stdout, stderr))
        streams = [own if end == -1 else end for own, end in ends]
        job = {"command": args, "cwd": str(cwd), "env": dict(env or os.environ)}
        self.pid = _zygote(args[2]).fork(job, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class _Zygote:
    """The process that forks the commands of one module."""

    def __init__(self, module: str) -> None:
        # What it forks twice becomes a child of this process.
        adopt_orphans()
        self._requests, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), module]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._lock = threading.Lock()
        atexit.register(self._requests.close)

    def fork(self, job: dict[str, Any], streams: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(job).encode() + b"\n"], streams)
            return int(self._requests.recv(100))


@functools.cache
def _zygote(module: str) -> _Zygote:
    return _Zygote(module)


def main() -> None:
    """Fork a command for each request, until the other end of the socket is closed."""
    requests, module = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for name in IMPORTS[module]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        request, streams, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        while request and not request.endswith(b"\n"):
            request += requests.recv(1 << 20)
        if not request:
            return
        reading, writing = os.pipe()
        if child := os.fork():
            # From then on it is the owner's child.
            os.waitpid(child, 0)
            requests.sendall(os.read(reading, 100))
        elif pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        else:
            for descriptor in (reading, writing, requests.detach()):
                os.close(descriptor)
            return _become(json.loads(request), streams)
        for descriptor in (reading, writing, *streams):
            os.close(descriptor)


def _become(job: dict[str, Any], streams: list[int]) -> None:
    """Run a command in this process, as if it were new."""
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    for descriptor in {*streams} - {0, 1, 2}:
        os.close(descriptor)
    # The old ones know whether their files could be sought in.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    os.chdir(job["cwd"])
    numpy.random.seed()
    os.environ.clear()
    os.environ.update(job["env"])
    _, _, module, *arguments = sys.orig_argv = job["command"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
