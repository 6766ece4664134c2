# SPDX-License-Identifier: Apache-2.0
"""The lines that step_timing_v1 and v2 put into a step, as one function per process.

They are read from the patched files, so the tight loop measures what the patches say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockpatch.blocks import parse

SCHEDULER, CORE = "v1/core/sched/scheduler.py", "v1/engine/core.py"
WORKER = "v1/worker/gpu_worker.py"
CONNECTOR_MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"

STEP_PATCHES = ("step_timing_v1", "step_timing_v2")

Hooks = Callable[[Any, Any], None]


def step_blocks(package: Path, file: str) -> list[str]:
    """Code of the blocks that run in a step, in the order of the file, not indented.

    Imports and what follows the making of the executor run once, and
    step_with_batch_queue is the loop of other engines. The hooks of request_timing are
    for requests, most of them not in every step.
    """
    return [
        textwrap.dedent(b"".join(block.code).decode())
        for block in parse((package / file).read_bytes(), file).blocks
        if block.patch in STEP_PATCHES
        and not block.id.endswith(("_import", "executor"))
        and not block.id.startswith("batch_queue_")
    ]


def engine_hooks(package: Path, names: dict[str, Any]) -> Hooks:
    """`hooks(scheduler, scheduler_output)`: an engine step's. `names` are its globals.

    `package` is the folder of the patched vLLM.
    """
    return _function(
        step_blocks(package, SCHEDULER) + step_blocks(package, CORE), names
    )


def worker_hooks(package: Path, names: dict[str, Any]) -> Hooks:
    """`hooks(worker, scheduler_output)`: those of a worker step, V1 model runner."""
    begin, end = step_blocks(package, WORKER)
    return _function([begin, *step_blocks(package, CONNECTOR_MIXIN), end], names)


def _function(blocks: list[str], names: dict[str, Any]) -> Hooks:
    body = textwrap.indent("".join(blocks), "    ")
    source = f"def hooks(self, scheduler_output):\n{body}"
    scope = dict(names)
    exec(compile(source, "<hooks of the patches>", "exec"), scope)
    return scope["hooks"]
