# SPDX-License-Identifier: Apache-2.0
"""kvindexd (kvindex/cmd/kvindexd): built with Go, and run beside instances."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.paths import REPOSITORY
from lab.serving.errors import ServerError
from lab.serving.server import tail
from lab.serving.supervise import Supervised

SOURCES = REPOSITORY / "kvindex" / "cmd" / "kvindexd"
PROGRAM = REPOSITORY / "kvindex" / "bin" / "kvindexd"
# PYTHONHASHSEED of instances that we launch, without which vLLM before 0.30 takes a
# seed for its block hashes that nobody knows.
HASH_SEED = "0"
READY_DEADLINE_S = 30.0


def build() -> Path:
    """The program, built from what the sources say now. Raises ServerError."""
    if shutil.which("go") is None:
        raise ServerError(
            "kvindexd has to be built, and Go is not installed: "
            "install Go 1.25 or later (https://go.dev/dl)"
        )
    PROGRAM.parent.mkdir(exist_ok=True)
    built = subprocess.run(
        ["go", "build", "-o", PROGRAM, "."],
        cwd=SOURCES,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    if built.returncode != 0:
        raise ServerError(f"kvindexd cannot be built:\n{built.stderr}")
    return PROGRAM


@contextmanager
def kvindexd(instances: Path, log: Path, *flags: str) -> Iterator[str]:
    """The address, unix:///..., of a kvindexd that follows the instances of a file.

    Raises ServerError.
    """
    program = build()
    with tempfile.TemporaryDirectory(prefix="kvindexd-") as folder:
        path = Path(folder) / "socket"
        command = [str(program), "-instances", str(instances)]
        command += ["-listen", f"unix://{path}", "-hash-seed", HASH_SEED, *flags]
        with Supervised(command, dict(os.environ), log) as process:
            _wait_ready(process, path, log)
            yield f"unix://{path}"


def _wait_ready(process: Supervised, path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.02)
    raise ServerError(f"kvindexd did not start\n{tail(log)}")
