# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine by nvidia-smi, and reasons not to measure on them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FIELDS = ("index", "name", "memory.total", "memory.used")
# Of all memory, what others may hold. A server asks for 95 %.
USABLE_SHARE = 0.95
INFINIBAND = Path("/sys/class/infiniband")


class NoGpu(Exception):
    """There is no usable answer from nvidia-smi; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, memory in MiB; `index` is nvidia-smi's, in the order of the PCI bus."""

    index: int
    name: str
    memory_mib: int
    used_mib: int


def visible_gpus() -> list[Gpu]:
    """List the GPUs that a server started here may use, the first one first.

    Raises NoGpu.
    """
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoGpu("there is no nvidia-smi here") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise NoGpu(f"nvidia-smi fails (status {done.returncode}): {said}")
    try:
        gpus = [_gpu(line) for line in done.stdout.splitlines()]
    except ValueError:
        raise NoGpu(f"nvidia-smi says what is not understood: {done.stdout}") from None
    if not gpus:
        raise NoGpu("nvidia-smi lists none")
    return gpus


def _gpu(line: str) -> Gpu:
    index, name, memory, used = (part.strip() for part in line.split(","))
    return Gpu(int(index), name, int(memory), int(used))


def gpu_problems(servers: int, workers: int = 1) -> Iterator[str]:
    """Why `servers` could not run here, each of whose `workers` needs a GPU."""
    try:
        gpus = visible_gpus()
    except NoGpu as error:
        yield f"this profile needs a GPU, and {error}; --profile cpu runs without one"
        return
    needed = servers * workers
    if len(gpus) < needed:
        each = "a GPU" if workers == 1 else f"{workers} GPUs"
        yield f"{servers} server(s) need {each} each, and {len(gpus)} can be seen here"
    for gpu in gpus[:needed]:
        if gpu.used_mib > (1 - USABLE_SHARE) * gpu.memory_mib:
            yield (
                f"{gpu.name}: {gpu.used_mib} of {gpu.memory_mib} MiB are in use, and a "
                f"server asks for {USABLE_SHARE:.0%}: end what nvidia-smi lists"
            )


def has_rdma() -> bool:
    """Return whether a port of an RDMA device is up."""
    states = INFINIBAND.glob("*/ports/*/state")
    return any("ACTIVE" in state.read_text() for state in states)
