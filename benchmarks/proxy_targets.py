# SPDX-License-Identifier: Apache-2.0
"""Server, routers and load generator, each a process on a core of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import NotMeasured
from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import open_url, without_proxy
from kvtax.proc.ports import reserve

SOURCE = Path(__file__).parent / "proxy_load.go"
WORKERS = 32


class BodyKind(NamedTuple):
    """The form and the tokens of a prompt, and how many are sent per second."""

    form: str
    tokens: int
    rate_rps: int


# The second and the last have the rates of the studies of llm-d's endpoint picker.
BODIES = {
    "small": BodyKind("ids", 16, 100),
    "200-token chat": BodyKind("chat", 200, 500),
    "33k ids": BodyKind("ids", 33_000, 100),
    "100k chat": BodyKind("chat", 100_000, 10),
}
ROUTER_CORE, LOAD_CORE = "0", "1"
START_S = 60.0


class Target(NamedTuple):
    """Destination of requests; `pid` is the router's process, None without a router."""

    url: str
    pid: int | None = None

    def peak_mib(self) -> float:
        """Return the router's peak resident memory so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def cpu_s(self) -> float:
        """Return the router's CPU time so far, in ticks of 10 ms."""
        if self.pid is None:
            return 0.0
        stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def build_load_program(folder: Path) -> Path:
    """Build the load generator, proxy_load.go. Raises NotMeasured without Go."""
    if shutil.which("go") is None:
        raise NotMeasured("Go is needed: https://go.dev/dl")
    program = folder / "proxy_load"
    subprocess.run(["go", "build", "-o", program, SOURCE], check=True)
    return program


@contextmanager
def process(core: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process on one core, which ends with the block or with this process."""
    pinned = ["taskset", "-c", core, *command]
    with subprocess.Popen(
        pinned,
        cwd=REPOSITORY,
        env=os.environ | without_proxy(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as one:
        try:
            yield one
        finally:
            one.terminate()
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                one.kill()


@contextmanager
def kvtax_proxy(server: str, log: Path) -> Iterator[Target]:
    """kvtax_fleet.proxy in front of `server`."""
    command = [sys.executable, "-m", "kvtax", "proxy", "--url", f"a={server}"]
    command += ["--policy", "linear", "--log", str(log)]
    with process(ROUTER_CORE, *command) as one:
        yield Target(url_of(one), one.pid)


def url_of(served: subprocess.Popen[str]) -> str:
    """Read the first line that a server prints."""
    assert served.stdout is not None
    return served.stdout.readline().strip()


@contextmanager
def vllm_router(server: str, command: str) -> Iterator[Target]:
    """vllm-router, cache-aware. Raises NotMeasured if it does not start."""
    router, metrics = reserve(2)
    options = ["--worker-urls", server, "--policy", "cache_aware"]
    options += ["--host", "127.0.0.1", "--port", str(router.http)]
    options += ["--prometheus-port", str(metrics.http), "--log-level", "error"]
    url = f"http://127.0.0.1:{router.http}"
    with process(ROUTER_CORE, command, *options) as one:
        deadline = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if one.poll() is not None or time.monotonic() > deadline:
                raise NotMeasured(f"{command} did not start")
            time.sleep(0.2)
        yield Target(url, one.pid)


def _answers(url: str) -> bool:
    try:
        with open_url(url, 1):
            return True
    except OSError:
        return False


class LoadGenerator:
    """Runs `program load` on a core of its own."""

    def __init__(self, program: Path) -> None:
        self._program = str(program)

    def times_ms(self, url: str, body: str, seconds: float) -> list[float]:
        """Time to the first byte of each request's answer, at the body's rate."""
        rate = str(BODIES[body].rate_rps)
        out = self._run(url, body, "-rate", rate, "-seconds", str(seconds))
        return [int(us) / 1000 for us in out.split()]

    def per_s(self, target: Target, body: str, seconds: float) -> list[float]:
        """Answers per second to WORKERS clients that wait for each of theirs.

        And the router's CPU time for each, in us.
        """
        options = "-workers", str(WORKERS), "-seconds", str(seconds)
        before_s = target.cpu_s()
        done, took = self._run(target.url, body, *options).split()
        cpu_s = target.cpu_s() - before_s
        return [int(done) / float(took), cpu_s / int(done) * 1e6]

    def _run(self, url: str, body: str, *options: str) -> str:
        form, tokens, _ = BODIES[body]
        command = ["taskset", "-c", LOAD_CORE, self._program, "load", "-url", url]
        command += ["-form", form, "-tokens", str(tokens), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotMeasured(f"{url}, {body}: {done.stderr.strip()}")
        return done.stdout
