# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several hosts on this machine: each has a network of its own.

A host is a network namespace with an address, joined to the others by a bridge in a
namespace more. A namespace lives as long as a process in it, so nothing of it outlives
the test. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

import pytest

from kvtax.hosts import MEASURES
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import Supervised, descendants, signal_all

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="networks need root")


def on_cluster(test):
    """Mark a test that starts a cluster."""
    return pytest.mark.long(NEEDS_ROOT(test))


RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
PORTS = {
    "runtime-env-agent": 6401,
    "dashboard-agent-grpc": 6402,
    "dashboard-agent-listen": 6403,
    "metrics-export": 6404,
}
OBJECT_STORE_BYTES = 100_000_000
READY_S = 150
# What `ray start` prints once its node has joined.
JOINED = "Ray runtime started"
# Another file at a path, for one host alone.
MOUNTED = 'mount --bind "$0" "$1" && shift && exec "$@"'


class Namespace:
    """A network of its own, kept by a process that sleeps."""

    def __init__(self, log: Path) -> None:
        command = ["unshare", "--net", "sleep", "infinity"]
        self._keeper = Supervised(command, dict(os.environ), log)
        while not (pids := self._keeper.pids()) or not _has_own_network(pids[0]):
            time.sleep(0.01)
        self.pid = pids[0]
        self.name = os.readlink(f"/proc/{self.pid}/ns/net")

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def ip(self, words: str) -> None:
        subprocess.run(self.inside("ip", *words.split()), check=True)

    def stop(self) -> None:
        self._keeper.stop()


class Host:
    """A node of the cluster, at 10.77.0.`number`; the first is its head.

    `instead`: paths that hold other files there.
    """

    def __init__(
        self, cluster: RayCluster, number: int, instead: dict[Path, Path]
    ) -> None:
        self.address = f"10.77.0.{number}"
        self.number = number
        self._cluster = cluster
        self.log = cluster.folder / f"host{number}.log"
        self.scratch = cluster.folder / f"tmp{number}"
        self.network = Namespace(self.log)
        switch = cluster.switch
        switch.ip(
            f"link add p{number} type veth peer name eth0 netns {self.network.pid}"
        )
        switch.ip(f"link set p{number} master br0 up")
        self.network.ip("link set lo up")
        self.network.ip(f"addr add {self.address}/24 dev eth0")
        self.network.ip("link set eth0 up")
        # By the way to anywhere, Ray learns its own address.
        self.network.ip("route add default dev eth0")
        self.ray = self._start(instead)

    def _start(self, instead: dict[Path, Path]) -> Supervised:
        role = ["--head", f"--port={PORT}", f"--temp-dir={self._cluster.folder}/ray"]
        if self.number > 1:
            role = [f"--address={self._cluster.address}"]
        command = [RAY, "start", "--block", "--disable-usage-stats", "--num-cpus=1"]
        command += [*role, f"--node-ip-address={self.address}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += ["--resources", json.dumps({MEASURES: 1})]
        # Each host has all ports to itself, so nobody need wait to hear of them.
        command += [f"--{use}-port={port}" for use, port in PORTS.items()]
        if self.number == 1:
            command += ["--include-dashboard=false"]
        # Or Ray wants the token that is in the user's home, if one is.
        env = {"RAY_AUTH_MODE": "disabled"} | os.environ
        env |= {
            "RAY_worker_niceness": str(self._cluster.niceness),
            "RAY_raylet_start_wait_time_s": str(READY_S),
        }
        for path, other in instead.items():
            bound = [MOUNTED, str(other), str(path)]
            command = ["unshare", "--mount", "sh", "-c", *bound, *command]
        self.scratch.mkdir(exist_ok=True)
        return Supervised(self.network.inside(*command), env, self.log, self.scratch)

    def processes(self, what: str) -> list[int]:
        """Those whose command line has `what`."""
        matching = []
        for pid in descendants(self.ray.supervisor_pid):
            with suppress(OSError):  # It may have ended by now.
                if what.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    matching.append(pid)
        return matching

    def kill(self) -> None:
        """All of it at once, as when a machine loses its power."""
        signal_all(descendants(self.ray.supervisor_pid), 9)

    def stop(self) -> None:
        self.ray.stop()
        self.network.stop()


class RayCluster:
    """`count` hosts; leaving the context ends them."""

    def __init__(self, count: int, niceness: int = 0) -> None:
        self._count = count
        self.niceness = niceness
        self._stack = ExitStack()

    def __enter__(self) -> RayCluster:
        with ExitStack() as stack:
            # Ray's sockets are below it, and their names must be short.
            made = tempfile.TemporaryDirectory(prefix="kvh", ignore_cleanup_errors=True)
            self.folder = Path(stack.enter_context(made))
            self.switch = Namespace(self.folder / "switch.log")
            stack.callback(self.switch.stop)
            self.switch.ip("link add br0 type bridge")
            self.switch.ip("link set br0 up")
            self._stack = stack
            self.hosts: list[Host] = []
            for _ in range(self._count):
                self.add()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        return f"10.77.0.1:{PORT}"

    def add(self, instead: dict[Path, Path] | None = None) -> Host:
        host = Host(self, len(self.hosts) + 1, instead or {})
        self._stack.callback(host.stop)
        self.hosts.append(host)
        self.wait_for(host)
        return host

    def processes(self, what: str) -> list[str]:
        """Commands with `what` in them that run on any host, whoever started them."""
        networks = {host.network.name for host in self.hosts}
        matching = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It may have ended by now.
                command = (process / "cmdline").read_text().replace("\0", " ")
                if what in command and os.readlink(process / "ns" / "net") in networks:
                    matching.append(command)
        return matching

    def nothing_stays(self, *commands: str, within_s: float) -> None:
        """Wait until no process of `commands` and no folder of work is left."""

        def left() -> list[object]:
            folders = (host.scratch.glob("kvtax-host-*") for host in self.hosts)
            return [*chain(*folders, *map(self.processes, commands))]

        deadline_s = time.monotonic() + within_s
        while left():
            assert time.monotonic() < deadline_s, left()
            time.sleep(0.1)

    def on_head(self, *command: str) -> list[str]:
        """`command`, as it runs on the first host."""
        return self.hosts[0].network.inside(*command)

    def wait_for(self, host: Host) -> None:
        """Until `host` has joined."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if JOINED in host.log.read_text():
                return
            time.sleep(0.2)
        raise TimeoutError(f"{host.address} did not join: {host.log.read_text()}")


class HeadCommand:
    """`python -m MODULE ...` on the first host, and what it has printed.

    Leaving the context kills it.
    """

    def __init__(
        self, cluster: RayCluster, log: Path, *module: str, deadline_s: float
    ) -> None:
        self.log, self._errors = log, log.with_name(f"{log.name}.err")
        self._deadline_s = deadline_s
        with self.log.open("wb") as out, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                cluster.on_head(sys.executable, "-m", *module),
                cwd=REPOSITORY,
                stdout=out,
                stderr=errors,
            )

    def __enter__(self) -> HeadCommand:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def printed(self) -> str:
        return self.log.read_text() + self._errors.read_text()

    @property
    def lines(self) -> list[list]:
        """The lines of JSON; Ray itself prints that a node is lost."""
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line.startswith("[")]

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for a condition that becomes true while the command runs."""
        deadline_s = time.monotonic() + self._deadline_s
        while not until():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < deadline_s, self.printed
            time.sleep(0.05)

    def status(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(self._deadline_s)


def _has_own_network(pid: int) -> bool:
    own = os.readlink("/proc/self/ns/net")
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != own
    except OSError:
        return False
