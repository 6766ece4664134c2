# SPDX-License-Identifier: Apache-2.0
"""The environment of a process with vLLM: what it inherits, and what it is given."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtax.engine import ServerError
from kvtax.engine.installation import Installation, installation
from kvtax.paths import REPOSITORY
from kvtax.proc.loopback import without_proxy
from kvtax.proc.ports import LOOPBACK, Ports
from kvtax.records.profile import EngineSettings

NULL_MODEL_PLUGIN = Path(__file__).with_name("vllm_plugin")
NULL_MODEL_NAME = "kvtax_null_model"
# The same block hashes in all servers, and sets in the same order.
HASH_SEED = "0"
# Shared by all instances that read each other: the caller's, for a fleet that several
# commands start, or one that this run alone knows.
DIRECT_READ_SECRET = os.environ.get("DIRECT_READ_SECRET") or secrets.token_hex(32)
TCMALLOC = "libtcmalloc_minimal.so.4"


def engine_environment(
    overlay: Path | None,
    settings: EngineSettings,
    ports: Ports,
    installed: Installation | None = None,
    beside: Path | None = None,
) -> dict[str, str]:
    """Build the whole environment of a process that runs vLLM patched by `overlay`.

    From weak to strong: what we were started with less what steers a recording, what
    any engine of ours needs, the ports, and `settings.server_env`. In `beside` are more
    packages. Records are off: `record_steps` turns them on. Raises ServerError.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVTAX_")
    }
    path: list[str | Path] = [overlay] if overlay else []
    path += [installed.sources] if installed and installed.sources else []
    path += [NULL_MODEL_PLUGIN, REPOSITORY]
    packages = [beside] if beside else []
    for place in (*path, *packages):
        if os.pathsep in str(place):
            raise ServerError(
                f"{place}: a colon ends a path in PYTHONPATH; name a folder without "
                "one with TMPDIR, or with --out"
            )
    # A user's connector may be there.
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path += packages
    needed = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONHASHSEED": HASH_SEED,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "DIRECT_READ_HOST": LOOPBACK,
        "DIRECT_READ_SECRET": DIRECT_READ_SECRET,
        **without_proxy(os.environ),
    }
    if (allowed := os.environ.get("VLLM_PLUGINS")) is not None:
        # Or vLLM would leave the null model out.
        names = [*filter(None, allowed.split(",")), NULL_MODEL_NAME]
        needed["VLLM_PLUGINS"] = ",".join(names)
    if settings.flavour == "cpu":
        needed["LD_PRELOAD"] = os.pathsep.join(cpu_preload(installed))
        # Or OpenMP's idle threads spin for 200 ms and take a core each. 0.18.1 sets
        # this itself, later releases do for threads that they bind to cores.
        needed["KMP_BLOCKTIME"] = "1"
        # What a new process has anyway; a fork's threads would be bound to cores.
        inherited.setdefault("KMP_AFFINITY", "none")
    if installed and installed.bytecode:
        needed["PYTHONPYCACHEPREFIX"] = installed.bytecode
    own_ports = {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.nixl),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(ports.bootstrap),
        "DIRECT_READ_PORT": str(ports.direct_read),
    }
    if settings.data_parallel == 1:  # several engines would all begin to look there
        own_ports["VLLM_PORT"] = str(ports.vllm_internal)
    return inherited | needed | own_ports | settings.server_env


def record_steps(folder: Path, label: dict[str, Any]) -> dict[str, str]:
    """Return the variables that make a patched vLLM write its step records to `folder`.

    `label` goes into the header of each file.
    """
    return {
        "KVTAX_STEP_RECORDS_DIR": str(folder),
        "KVTAX_STEP_RECORDS_LABEL": json.dumps(label),
        # A sweep holds the CPU clocks of all steps against |cache|.
        "KVTAX_STEP_RECORDS_CPU_EVERY": "1",
        # The ids are those of our own drivers.
        "KVTAX_REQUEST_IDS": "plain",
    }


def cpu_preload(installed: Installation | None = None) -> list[str]:
    """Find the two libraries without which vLLM's CPU worker refuses to start.

    tcmalloc is left for the loader to find. Whether both can be loaded is tried, since
    it skips what it cannot load: the server would run without. Raises ServerError.
    """
    installed = installed or installation()
    openmp = str(Path(installed.prefix, "lib", "libiomp5.so"))
    # LD_PRELOAD knows no quotes.
    if set(openmp) & set(" :"):
        remedy = "move the checkout to a path without them, and remove its .venv"
        if not installed.is_ours:
            remedy = "make the environment again at a path without them"
        raise ServerError(
            f"{installed.prefix!r} has a space or a colon, which end a path in "
            f"LD_PRELOAD: {remedy}"
        )
    libraries = [TCMALLOC, openmp]
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", ""],
        env=os.environ | {"LD_PRELOAD": os.pathsep.join(libraries)},
        capture_output=True,
        text=True,
    )
    if complaint := [
        line for line in loaded.stderr.splitlines() if "LD_PRELOAD" in line
    ]:
        remedy = "run bash setup.sh cpu"
        if not installed.is_ours:
            remedy = f"{installed.python} needs intel-openmp, the system tcmalloc"
        raise ServerError(f"{remedy}: {'; '.join(complaint)}")
    return libraries
