# SPDX-License-Identifier: Apache-2.0
"""The Python interpreter that a user's command runs, and the packages it imports.

A command is `vllm ...`, `python ...`, `torchrun ...` or another script of Python's,
behind `env NAME=VALUE` if need be. Of any other command the user names the Python.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvtax.engine import InstallationError

_PYTHON = re.compile(r"python(3(\.\d+)?)?t?$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
# Scripts and modules of Python's that start other commands in environments of their
# own, by a file that says which.
_LAUNCHERS = {
    *("pipx", "pipenv", "hatch", "poetry", "pdm", "nox", "tox", "uv", "conda", "mamba"),
    *("ray", "honcho", "circusd", "supervisord"),
}
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


class UnknownPython(InstallationError):
    """The command does not show its Python."""


class CommandNotFound(Exception):
    """There is no such command; the exit code is a shell's."""

    exit_code = 127


@dataclass(frozen=True)
class CommandPython:
    """An interpreter, and the `folder` where it looks for modules first."""

    python: str
    folder: str

    def package(self, name: str) -> Path:
        """Find a package's folder without importing it. Raises InstallationError."""
        command = [self.python, "-B", "-c", _FOLDER, name, self.folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or error
            raise InstallationError(f"{self.python} does not run: {why}") from None
        if not (folder := done.stdout.splitlines()[-1]):
            raise InstallationError(f"package {name} is not installed in {self.python}")
        return Path(folder)


def _program(name: str, path: str | None) -> str | None:
    """Return the file of a command; None if there is none.

    A file that is named is not tried for its mode: access(2) ignores the capabilities
    with which another user's file may be run.
    """
    if os.sep in name:
        return name if os.path.isfile(name) else None
    return shutil.which(name, path=path)


def python_of(command: Sequence[str], named: str | None = None) -> CommandPython:
    """Find the Python of a command, or the one that the user has `named`.

    Raises CommandNotFound, UnknownPython, and InstallationError for a command that
    would lose the patches.
    """
    words, assigned = _without_env(command)
    path = assigned.get("PATH", os.environ.get("PATH"))
    if not (program := _program(words[0], path)):
        raise CommandNotFound(f"{words[0]}: command not found")
    if "PYTHONPATH" in assigned:
        _refuse(command, "it sets another PYTHONPATH; set it before kvtax run")
    if cluster := _ray_cluster(words, assigned):
        _refuse(
            command,
            f"its workers are those of the Ray cluster at {cluster}, which runs "
            "already; patch the files of its hosts with kvtax patch",
        )
    if named:
        return CommandPython(shutil.which(named) or named, os.getcwd())
    interpreter = [program, *words[1:]]
    if not _PYTHON.match(Path(program).name):
        interpreter = [*_shebang_words(program)]
    if not interpreter or _starts_another(interpreter, program, words):
        raise UnknownPython(f"{shlex.join(command)!r} does not show its Python")
    flags, script = _python_arguments(interpreter[1:])
    if flags:
        python = Path(interpreter[0]).name
        _refuse(command, f"{python} -{flags} reads no PYTHONPATH")
    if interpreter[0] == program:
        return CommandPython(program, _first_folder(script))
    python = shutil.which(interpreter[0], path=path) or interpreter[0]
    return CommandPython(python, str(Path(program).resolve().parent))


def _starts_another(
    interpreter: Sequence[str], program: str, words: Sequence[str]
) -> bool:
    """Return whether a script or module of Python's is to start another command.

    Of a script, that is a later word that is vLLM or a Python, and no option's value.
    """
    if interpreter[0] == program:
        module = next((b for a, b in pairwise(words) if a == "-m"), "")
        return module.partition(".")[0] in _LAUNCHERS
    name = Path(program).name
    return name in _LAUNCHERS or any(
        not (before.startswith("-") and before != "--") and _is_server(word)
        for before, word in pairwise(words)
        if name != "vllm"
    )


def _is_server(word: str) -> bool:
    name = Path(word).name
    return name == "vllm" or bool(_PYTHON.match(name))


def _refuse(command: Sequence[str], why: str) -> None:
    raise InstallationError(
        f"{shlex.join(command)!r}: {why}, so vLLM would not be patched"
    )


def _without_env(command: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
    """Split `env NAME=VALUE ... command` into the command and the variables."""
    if Path(command[0]).name != "env":
        return command, {}
    words, assigned = [*command[1:]], {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        assigned[name] = value
    if not words or words[0].startswith("-"):
        return command, {}
    return words, assigned


def _python_arguments(words: Sequence[str]) -> tuple[str, str]:
    """Return the flags that shut us out, and the script; "" after -c or -m."""
    isolating = ""
    rest = iter(words)
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, "")
        elif word == "-" or not word.startswith("-"):
            return isolating, word
        elif not word.startswith("--"):
            flags = re.match(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.S)
            assert flags
            isolating += "".join(flag for flag in flags[1] if flag in "IES")
            if flags[2] in ("c", "m") and flags[2]:
                break
            if flags[2] and not flags[3]:
                next(rest, "")
    return isolating, ""


def _first_folder(script: str) -> str:
    """Return the folder of a script, or the working directory."""
    return str(Path(script).resolve().parent) if Path(script).is_file() else os.getcwd()


def _shebang_words(program: str) -> Iterator[str]:
    """Yield the interpreter of a script of Python's and its arguments."""
    words: list[str] = []
    if os.access(program, os.R_OK):
        with open(program, "rb") as file:
            text = file.read(4096) if file.read(2) == b"#!" else b""
        # Where its path is long, the second line starts the interpreter.
        for line in text.decode(errors="replace").splitlines()[:2]:
            try:
                words += shlex.split(line)
            except ValueError:  # a quote that ends on another line
                words += line.split()
    for index, word in enumerate(words):
        if _PYTHON.match(Path(word).name):
            yield from words[index:]
            return


def _ray_cluster(words: Sequence[str], assigned: Mapping[str, str]) -> str:
    """Return the address of a running Ray cluster that the command would join."""
    options = ("--distributed-executor-backend", "--data-parallel-backend", "-dpb")
    pairs = [*pairwise(words), *(tuple(word.split("=", 1)) for word in words)]
    if not any(pair[0] in options and pair[-1] == "ray" for pair in pairs):
        return ""
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    address = assigned.get("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    if not address and current.is_file() and _answers(current.read_text().strip()):
        address = current.read_text().strip()
    return "" if address == "local" else address


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True
