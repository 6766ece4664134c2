# SPDX-License-Identifier: Apache-2.0
"""vllm-router, the router of the vLLM project, in an environment of its own.

It is installed from locks/vllm-router.txt when it is first asked for, never into .venv.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvtax.engine import ServerError
from kvtax.engine.releases import environment
from kvtax.paths import REPOSITORY

LOCK = REPOSITORY / "locks" / "vllm-router.txt"
NEEDED_GIB = 0.5
# Those that need nothing but the instances' addresses.
POLICIES = (
    "cache_aware",
    "consistent_hash",
    "power_of_two",
    "random",
    "round_robin",
    "sticky_least_loaded",
)


def version() -> str:
    """Return the version that its lock installs: `0.1.17`."""
    return re.findall(r"^vllm-router==(\S+)", LOCK.read_text(), re.M)[0]


def executable() -> Path:
    """Find the program; install it if it is missing. Raises ServerError."""
    what = f"vllm-router {version()}"
    try:
        place = environment("vllm-router", what, LOCK, NEEDED_GIB)
    except ServerError as error:
        raise ServerError(
            f"{what} is needed, and could not be installed from "
            f"{LOCK.relative_to(REPOSITORY)} (at first use that takes a package "
            f"registry): {error}"
        ) from None
    return place / "bin" / "vllm-router"
