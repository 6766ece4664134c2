# SPDX-License-Identifier: Apache-2.0
"""Checks before a sweep: what would make it fail or lie, found in seconds."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from kvtax import patcher
from kvtax.engine import ServerError
from kvtax.engine.connector import Connector
from kvtax.engine.environment import cpu_preload
from kvtax.engine.gpus import gpu_problems
from kvtax.engine.installation import Installation, installation
from kvtax.engine.server import tail
from kvtax.proc.supervise import Supervised, descendants, supervisors
from kvtax.records.profile import EngineSettings

MIN_MEMORY_GIB = 5.0
# Each server beside the first: 1.9 GiB at their peak where that was measured.
FURTHER_SERVER_GIB = 2.5
MIN_DISK_GIB = 2.0
# The usual soft limit, which every run so far had; with 64 vLLM does not start.
MIN_OPEN_FILES = 1024
SURVIVOR_DEADLINE_S = 60.0
# The first Mooncake that reports no write over TCP done whose bytes are under way. Of
# writes by 0.3.10 to 0.3.11.post1 96 % were (747 of 780), of later ones none of 520.
FIRST_HONEST_VERSION = (0, 3, 12)
# The module that loads a package's libraries.
NATIVE = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


class PreflightError(Exception):
    """Something must be mended before this can run; the message says what."""

    exit_code = 3


# What may be wrong with one config without sinking the others.
CONFIG_ERRORS = (PreflightError, patcher.BlockPatchError, ModuleNotFoundError)


def check_machine(
    settings: EngineSettings, servers: int = 1, installed: Installation | None = None
) -> None:
    """Check that `servers` at once can be measured here. Raises PreflightError."""
    check_resources(settings, servers, installed)
    _await_survivors()


def check_resources(
    settings: EngineSettings, servers: int, installed: Installation | None = None
) -> None:
    """Check that `servers` at once can run. Raises PreflightError with all reasons."""
    if problems := list(resource_problems(settings, servers, installed)):
        raise PreflightError("\n".join(problems))


def resource_problems(
    settings: EngineSettings, servers: int = 1, installed: Installation | None = None
) -> Iterator[str]:
    """Yield each reason why `servers` at once could not run here."""
    installed = installed or installation()
    if not installed.has_vllm(settings.flavour):
        remedy = f"run bash setup.sh {settings.flavour}"
        if not installed.is_ours:
            remedy = f"{installed.python} needs it for the {settings.flavour} profiles"
        yield f"vLLM for {settings.flavour.upper()}s is not installed: {remedy}"
    if settings.flavour == "gpu":
        yield from gpu_problems(servers, settings.workers)
    else:
        try:
            cpu_preload(installed)
        except ServerError as error:
            yield str(error)
    workers = servers * settings.workers
    needed_gib = MIN_MEMORY_GIB + (workers - 1) * FURTHER_SERVER_GIB
    if (memory_gib := _available_gib()) < needed_gib:
        yield (
            f"{memory_gib:.1f} GiB of memory available where {servers} server(s) at "
            f"once need {needed_gib:.1f}: free some, or start fewer"
        )
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= open_files < MIN_OPEN_FILES:
        yield (
            f"a process may have {open_files} open files, a server and its driver need "
            f"{MIN_OPEN_FILES:,}: raise the hard limit (ulimit -Hn)"
        )
    disk_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    if disk_gib < MIN_DISK_GIB:
        yield f"{disk_gib:.1f} GiB of disk free, a run needs {MIN_DISK_GIB:.0f}"


def _available_gib() -> float:
    """Memory that programs can have: what is free, and what caches files."""
    return float(psutil.virtual_memory().available / 2**30)


def check_import(
    scratch: Path, settings: EngineSettings, installed: Installation
) -> Installation:
    """Import vLLM, with its log in `scratch`, and return the installation.

    Bytecode that a user's packages lack goes to `scratch`, too: what runs them writes
    none. Raises PreflightError with vLLM's own message if the import fails,
    ModuleNotFoundError if there is no vLLM.
    """
    vllm = installed.package("vllm")
    env = dict(os.environ)
    command = installed.command()
    if not (installed.is_ours or installed.has_bytecode()):
        env["PYTHONPYCACHEPREFIX"] = str(scratch / "bytecode")
        installed = replace(installed, bytecode=env["PYTHONPYCACHEPREFIX"])
        command = [installed.python]
        compiler = [*command, "-m", "compileall", "-q", "-j", "0"]
        subprocess.run(
            [*compiler, str(vllm)], env=env, stdout=subprocess.DEVNULL, check=False
        )
    if settings.flavour == "cpu":
        env["LD_PRELOAD"] = os.pathsep.join(cpu_preload(installed))
    log = scratch / "import.log"
    script = "import vllm.entrypoints.openai.api_server"
    with Supervised([*command, "-c", script], env, log) as process:
        status = process.wait()
    if status != 0:
        raise PreflightError(f"vllm cannot be imported:\n{tail(log)}")
    return installed


def check_connector(
    connector: Connector, installed: Installation | None = None
) -> None:
    """Check that the connector's transfer engine is usable. Raises PreflightError."""
    installed = installed or installation()
    if connector.package:
        try:
            installed.package(connector.package)
        except ModuleNotFoundError as error:
            remedy = "run bash setup.sh" if installed.is_ours else "install it there"
            raise PreflightError(f"{error}: {remedy}") from None
        if reason := _load_error(installed.python, connector.package):
            raise PreflightError(f"{connector.package} cannot be loaded: {reason}")
    if connector.package == "mooncake":
        require_honest_transfers(installed)


@functools.cache
def _load_error(python: str, package: str) -> str | None:
    """Return why the package's libraries cannot be loaded, None if they can."""
    if package not in NATIVE:
        return None
    command = [python, "-B", "-c", f"import {NATIVE[package]}"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else None


def require_honest_transfers(installed: Installation | None = None) -> None:
    """Refuse a Mooncake that reports writes done whose bytes are still under way.

    Whoever checks tokens that came over Mooncake calls this first. Raises
    PreflightError.
    """
    for name, version in (installed or installation()).versions.items():
        if not name.startswith("mooncake-transfer-engine"):
            continue
        numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        if numbers < FIRST_HONEST_VERSION:
            first = ".".join(map(str, FIRST_HONEST_VERSION))
            raise PreflightError(
                f"{name} {version} loses a race over TCP (docs/method.md): "
                f"install {first} or later"
            )


def _await_survivors() -> None:
    """Wait for a sweep that was killed a moment ago: it still stops its server."""
    deadline = time.monotonic() + SURVIVOR_DEADLINE_S
    while survivors := _other_supervisors():
        if time.monotonic() > deadline:
            raise PreflightError(
                f"servers of another run are still up, below processes {survivors}"
            )
        time.sleep(0.5)


def _other_supervisors() -> list[int]:
    return sorted(supervisors() - set(descendants(os.getpid())))
