# SPDX-License-Identifier: Apache-2.0
"""kvindexd, and what answers like it: built with Go, and run beside instances."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtax.engine import ServerError
from kvtax.engine.server import tail
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import Supervised

BINARIES = REPOSITORY / "kvindex" / "bin"
# PYTHONHASHSEED of instances that we launch, without which vLLM before 0.30 takes a
# seed for its block hashes that nobody knows.
HASH_SEED = "0"
READY_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Program:
    """It follows instances, and answers which of them hold a prompt's leading blocks.

    `sources` is a folder below kvindex/.
    """

    name: str
    sources: str


KVINDEXD = Program("kvindexd", "cmd/kvindexd")
LLMD_LOOKUP = Program("llmd-lookup", "llmd/router/cmd/llmd-lookup")


def build(program: Program = KVINDEXD) -> Path:
    """Build the binary from the present sources. Raises ServerError."""
    if shutil.which("go") is None:
        raise ServerError(
            f"{program.name} has to be built, and Go is not installed: "
            "install Go 1.25 or later (https://go.dev/dl)"
        )
    BINARIES.mkdir(exist_ok=True)
    binary = BINARIES / program.name
    built = subprocess.run(
        ["go", "build", "-o", binary, "."],
        cwd=REPOSITORY / "kvindex" / program.sources,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    if built.returncode != 0:
        raise ServerError(f"{program.name} cannot be built:\n{built.stderr}")
    return binary


@contextmanager
def kvindexd(
    instances: Path, log: Path, *flags: str, program: Program = KVINDEXD
) -> Iterator[str]:
    """Yield the address, unix:///..., of a kvindexd that follows `instances`.

    Raises ServerError.
    """
    binary = build(program)
    with tempfile.TemporaryDirectory(prefix="kvindexd-") as folder:
        path = Path(folder) / "socket"
        command = [str(binary), "-instances", str(instances)]
        command += ["-listen", f"unix://{path}", "-hash-seed", HASH_SEED, *flags]
        with Supervised(command, dict(os.environ), log) as process:
            if not _answers(process, path):
                raise ServerError(f"{program.name} did not start\n{tail(log)}")
            yield f"unix://{path}"


def _answers(process: Supervised, path: Path) -> bool:
    deadline = time.monotonic() + READY_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return True
        time.sleep(0.02)
    return False
