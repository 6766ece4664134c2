# SPDX-License-Identifier: Apache-2.0
"""A stand-in as a process that ends with its `with` block, or with its parent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import open_url
from tests.harness.forked import Forked

TIMEOUT_S = 60.0


class Standin(NamedTuple):
    """A running stand-in."""

    process: subprocess.Popen[str]
    url: str

    def set_faults(
        self, *names: str, after: int = 1, deaf: bool = False, ignored_resets: int = 0
    ) -> None:
        """Set the cycle of faults from the next request on; none: no faults."""
        query = f"cycle={','.join(names)}&after={after}&deaf={deaf:d}"
        query += f"&ignored_resets={ignored_resets}"
        url = f"{self.url}/faults?{query}"
        open_url(urllib.request.Request(url, method="POST"), TIMEOUT_S).close()

    def metrics(self) -> dict[str, float]:
        """Return its counters by name, and by their own label if they have one."""
        with open_url(f"{self.url}/metrics", TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {_short(name): float(value) for name, value in samples}


@contextlib.contextmanager
def standin(*options: str) -> Iterator[Standin]:
    """Start one with these command line options."""
    with Forked(
        [sys.executable, "-m", "tests.harness.standin.server", *options],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Standin(process, process.stdout.readline().strip())
        finally:
            process.kill()


def _short(name: str) -> str:
    """Shorten `vllm:x{engine="0",model_name="m",source="s"}` to `vllm:x{s}`."""
    metric, _, labels = name.partition("{")
    own = labels.rstrip("}").split(",")[2:]
    return f"{metric}{{{own[0].split('=')[1].strip(chr(34))}}}" if own else metric
