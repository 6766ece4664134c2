# SPDX-License-Identifier: Apache-2.0
"""The Python interpreter that a user's command runs, and the packages it imports."""

from __future__ import annotations

import getopt
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from kvtax.engine import InstallationError

_PYTHON = re.compile(r"python(3(\.\d+)?)?t?$")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ash"}
# Programs that start others elsewhere, or without PYTHONPATH.
_ELSEWHERE = {"sudo", "doas", "pkexec", "ssh", "docker", "podman", "nerdctl", "kubectl"}
_LOGINS = {"su", "runuser"}  # with one of these options
_LOGIN_OPTIONS = {"-", "-l", "--login"}
_OPERATOR = re.compile(r"[();<>|&\n]+")
# Programs and words of a shell that take text, not a command.
_TEXT = {"echo", "printf", "which", "type", "test", "[", "[[", "for", "case"}
# What a command may begin with, beside options, numbers and variables.
_BEFORE = {"exec", "nohup", "time", "nice", "timeout", "setsid", "stdbuf", "taskset"}
_BEFORE |= {"export", "!", "{", "if", "then", "elif", "else", "while", "until", "do"}
_MORE_BEFORE = re.compile(r"-|\d+$|\w+=")
_ENV_OPTIONS = (
    "i0vu:C:S:",
    ["ignore-environment", "null", "debug", "unset=", "chdir=", "split-string="],
)
_DATA_PARALLEL = ("--data-parallel-backend", "-dpb")
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


class _Arguments(NamedTuple):
    """Arguments of an interpreter: its flags that shut us out, and its script."""

    isolating: str
    script: str


def _python_arguments(words: Sequence[str]) -> _Arguments:
    """Read the arguments as Python does; what follows -c or -m is no script."""
    isolating = ""
    rest = iter(words)
    for word in rest:
        if word == "--check-hash-based-pycs":
            next(rest, "")
        elif word == "-" or not word.startswith("-"):
            return _Arguments(isolating, word)
        elif not word.startswith("--"):
            flags = re.match(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.S)
            assert flags
            isolating += "".join(flag for flag in flags[1] if flag in "IES")
            if flags[2] in ("c", "m") and flags[2]:
                break
            if flags[2] and not flags[3]:
                next(rest, "")
    return _Arguments(isolating, "")


def _first_folder(arguments: Sequence[str]) -> str:
    """Folder of the script that an interpreter is to run, or the working directory."""
    script = _python_arguments(arguments).script
    return str(Path(script).resolve().parent) if Path(script).is_file() else os.getcwd()


def require_environment(command: Sequence[str]) -> None:
    """Refuse a command that does not hand PYTHONPATH on to its Python.

    Raises InstallationError.
    """
    for why in _shut_out(command):
        raise InstallationError(
            f"{shlex.join(command)!r}: {why}, so vLLM would not be patched"
        )


def _shut_out(words: Sequence[str]) -> Iterator[str]:
    """Yield each reason why PYTHONPATH gets lost on the way that the words show."""
    yield from _lost_by(words)
    scripts = [command for word in words if " " in word for command in _commands(word)]
    words = [*words, *chain.from_iterable(scripts)]
    backends = _values(words, "--distributed-executor-backend", *_DATA_PARALLEL)
    if "ray" in backends and (cluster := _ray_cluster(words)):
        yield (
            f"its workers are those of the Ray cluster at {cluster}, which runs "
            "already; patch the files of its hosts with kvtax patch"
        )


def _lost_by(words: Sequence[str]) -> Iterator[str]:
    """Yield why one command does not hand PYTHONPATH on to its Python.

    A program that is not known may start what its arguments name: that counts where
    a Python is among these.
    """
    starts = [bool(_interpreter(word, words[n + 1 :])) for n, word in enumerate(words)]
    is_first, is_started = True, False
    for index, word in enumerate(words):
        name, rest = Path(word).name, words[index + 1 :]
        if starts[index]:
            is_started, python = True, _interpreter(word, rest)
            if flags := _python_arguments(python[1:]).isolating:
                yield f"{Path(python[0]).name} -{flags} reads no PYTHONPATH"
        elif is_started or not (is_first or name in _SHELLS or any(starts[index:])):
            continue
        elif word.startswith("PYTHONPATH=") and "$" not in word:
            yield "it sets another PYTHONPATH; set it before kvtax run"
        elif name in _ELSEWHERE or (name in _LOGINS and _LOGIN_OPTIONS & {*rest}):
            yield f"{name} starts it without PYTHONPATH; put kvtax run behind {name}"
        elif name == "unset" and rest[:1] == ["PYTHONPATH"]:
            yield "it unsets PYTHONPATH"
        elif name == "env":
            yield from _lost_by_env(rest)
        elif name in _SHELLS:
            for command in _commands(_shell_script(rest)):
                yield from _lost_by(command)
            return
        elif name == "ray" and rest[:1] == ["job"]:
            yield "ray job starts it in a cluster; put kvtax run into the job"
        elif is_first and name in _TEXT:
            return
        is_first &= name in _BEFORE or bool(_MORE_BEFORE.match(word))


def _interpreter(word: str, rest: Sequence[str]) -> Sequence[str]:
    """Return the Python that a word starts, by name or as a script, and arguments."""
    started = [word, *rest]
    if not _PYTHON.match(Path(word).name):
        program = shutil.which(word)
        is_readable = program and os.access(program, os.R_OK)
        started = [*_shebang_words(program)] if program and is_readable else []
    for index, name in enumerate(started):
        if _PYTHON.match(Path(name).name):
            return started[index:]
    return ()


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


def _lost_by_env(words: Sequence[str]) -> Iterator[str]:
    """Yield why `env` with these arguments does not hand PYTHONPATH on."""
    try:
        options, command = getopt.getopt([*words], *_ENV_OPTIONS)
    except getopt.GetoptError:
        return
    for option, value in options:
        if option in ("-i", "--ignore-environment"):
            yield f"env {option} starts it with no PYTHONPATH"
        elif option in ("-u", "--unset") and value == "PYTHONPATH":
            yield "env takes PYTHONPATH away"
        elif option in ("-S", "--split-string"):
            yield from _lost_by(["env", *next(_commands(value)), *command])
    if command[:1] == ["-"]:
        yield "env - starts it with no PYTHONPATH"


def _shell_script(words: Sequence[str]) -> str:
    """Return the text that a shell is to run after -c."""
    is_script = False
    rest = iter(words)
    for word in rest:
        if word in ("--rcfile", "--init-file") or re.fullmatch(r"[-+]\w*[oO]", word):
            is_script |= "c" in word and not word.startswith("--")
            next(rest, "")
        elif re.fullmatch(r"-\w*c\w*", word):
            is_script = True
        elif not word.startswith(("-", "+")):
            return word if is_script else ""
    return ""


class _Text(io.StringIO):
    """Text of which shlex skips the comments, but not the ends of their lines."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        line = super().readline(size)
        self.seek(self.tell() - line.endswith("\n"))
        return line


def _commands(script: str) -> Iterator[list[str]]:
    """Split a shell's text into commands, without comments and redirections."""
    text = _Text(script.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    command: list[str] = []
    try:
        for word in lexer:
            if not _OPERATOR.fullmatch(word):
                command.append(word)
            elif "<" in word or ">" in word:
                next(lexer, "")
            else:
                yield command
                command = []
    except ValueError:  # a quote that is not closed
        pass
    yield command


def _values(words: Sequence[str], *options: str) -> set[str]:
    following = {value for option, value in pairwise(words) if option in options}
    joined = (word.partition("=") for word in words)
    return following | {value for option, _, value in joined if option in options}


def _ray_cluster(words: Sequence[str]) -> str:
    """Return the address of a Ray cluster that the command would join, if it would."""
    given = _values(words, "RAY_ADDRESS") | {os.environ.get("RAY_ADDRESS", "")}
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if current.is_file() and _answers(address := current.read_text().strip()):
        given.add(address)
    return next(iter(given - {"", "local"}), "")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True
