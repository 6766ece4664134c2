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

from lab.paths import REPOSITORY
from lab.serving.errors import ServerError

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


@dataclass(frozen=True)
class Installation:
    """`versions` are those of all installed distributions, by name."""

    python: str
    prefix: str
    python_version: str
    versions: dict[str, str]

    @property
    def is_ours(self) -> bool:
        """Whether it is one that this checkout made, for itself or for a release."""
        return self.python == sys.executable or Path(self.python).is_relative_to(
            REPOSITORY
        )

    def command(self, *arguments: str) -> list[str]:
        """What runs this Python, so that it leaves nothing beside its packages."""
        return [self.python, *([] if self.is_ours else ["-B"]), *arguments]

    def package(self, name: str) -> Path:
        """Folder of an installed package, found without importing it.

        Raises ModuleNotFoundError if there is none.
        """
        if not (folder := _asked(self.python, FOLDER, name).strip()):
            raise ModuleNotFoundError(
                f"package {name} is not installed in {self.python}"
            )
        return Path(folder)


@functools.cache
def installation(python: str = sys.executable) -> Installation:
    """What is installed for `python`, a path or a command.

    Raises ServerError if it is no Python.
    """
    # Not resolved: a link to a Python in an environment is what makes it that one's.
    path = os.path.abspath(shutil.which(python) or python)
    try:
        facts = json.loads(_asked(path, FACTS))
    except ValueError:
        raise ServerError(f"{python} is not a Python: it does not answer") from None
    return Installation(path, **facts)


@functools.cache
def _asked(python: str, script: str, *arguments: str) -> str:
    """Alone, as a server's own folders must not be taken for what is installed."""
    env = {name: of for name, of in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-B", "-c", script, *arguments]
    try:
        asked = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise ServerError(f"{python} cannot be run: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise ServerError(
            f"{python} is not a Python: {error.stderr.strip() or error}"
        ) from None
    return asked.stdout
