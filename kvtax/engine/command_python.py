# SPDX-License-Identifier: Apache-2.0
"""The Python interpreter that a user's command runs, and the packages it imports."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtax.engine.errors import InstallationError

_PYTHON = re.compile(r"python(3(\.\d+)?)?$")
# As a script or `-m` would have it, sys.path begins with a folder of its own.
_FOLDER = """
import importlib.util, os, sys
name, first = sys.argv[1:]
if sys.path[0] in ("", os.getcwd()):
    sys.path[0] = first
spec = importlib.util.find_spec(name)
print()
print(*(spec.submodule_search_locations or [])[:1] if spec else "")
"""


@dataclass(frozen=True)
class CommandPython:
    """An interpreter, and the `folder` where it looks for modules first."""

    python: str
    folder: str

    def package(self, name: str) -> Path:
        """Find a package's folder without importing it. Raises InstallationError."""
        command = [self.python, "-B", "-c", _FOLDER, name, self.folder]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            raise InstallationError(f"{self.python} does not run: {why}") from None
        if not (folder := asked.stdout.splitlines()[-1]):
            raise InstallationError(f"package {name} is not installed in {self.python}")
        return Path(folder)


def python_of(command: Sequence[str], named: str | None = None) -> CommandPython:
    """Find the Python of a command: `python ...`, a Python script, or `env ... vllm`.

    One that the user has `named` is taken instead. Raises InstallationError if there is
    none.
    """
    if named:
        return CommandPython(shutil.which(named) or named, os.getcwd())
    for index, word in enumerate(command):
        if not (program := shutil.which(word)):
            continue
        if _PYTHON.match(Path(program).name):
            return CommandPython(program, _first_folder(command[index + 1 :]))
        for python in _shebang_words(program):
            if _PYTHON.match(Path(python).name) and (found := shutil.which(python)):
                return CommandPython(found, str(Path(program).resolve().parent))
    raise InstallationError(
        f"no Python to be seen in the command {shlex.join(command)!r}: name the one "
        "that has vLLM with --python"
    )


def _first_folder(arguments: Sequence[str]) -> str:
    """Folder of the script that an interpreter is to run, or the working directory."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    return str(Path(script).resolve().parent) if Path(script).is_file() else os.getcwd()


def _shebang_words(program: str) -> Iterator[str]:
    """Yield the words of a script's first lines; long paths are in the second."""
    with open(program, "rb") as file:
        if file.read(2) != b"#!":
            return
        lines = file.read(4096).decode(errors="replace").splitlines()[:2]
    for line in lines:
        try:
            yield from shlex.split(line)
        except ValueError:  # a quote that ends on another line
            yield from line.split()
