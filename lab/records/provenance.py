# SPDX-License-Identifier: Apache-2.0
"""Where and with what a result was made: a part of every result file."""

from __future__ import annotations

import msgspec


class Provenance(msgspec.Struct, kw_only=True):
    """What of a machine, its software and our code may change a result."""

    vllm_version: str | None
    """The version of vLLM that is installed."""
    python_version: str
    """The version of Python."""
    package_versions: dict[str, str]
    """Versions of the packages that matter, by name."""
    patch_hashes: dict[str, str]
    """SHA-256 by name of the patches that were applied."""
    host: str
    """Name of the machine."""
    cpu_model: str | None
    """Model of its CPU."""
    cpu_count: int | None
    """Logical cores of the machine."""
    cpu_affinity: list[int]
    """Cores that this process may run on."""
    cpu_governor: str | None
    """Frequency governor of the first core; null where the kernel names none."""
    load_average: list[float]
    """Load over 1, 5 and 15 minutes before the run."""
    hash_seed: str | None
    """`PYTHONHASHSEED` of this process; null if it is not set."""
    cgroup_limits: dict[str, str]
    """Limits on CPU and memory of this process's control group."""
    gpu_model: str | None
    """Model of the GPUs; null without any."""
    kernel: str
    """Release of the kernel."""
    date_utc: str
    """When this was noted."""
    git_commit: str | None
    """Commit of this repository; null outside of git."""
    git_dirty: bool | None
    """Whether there were uncommitted changes."""
    command_line: str
    """The command that was run."""
