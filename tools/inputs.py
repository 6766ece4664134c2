# SPDX-License-Identifier: Apache-2.0
"""Check that committed results were made from the inputs that are committed now.

    python -m tools.inputs                        check all; exit code 1 if one differs
    python -m tools.inputs RESULT INPUT...        note what RESULT was made from

inputs.lock has a table for each committed result: its inputs, files or folders, with
their SHA-256. Notes are of the files as they lie here; the check compares with HEAD, so
that a result which you made again and did not commit changes nothing. An input that
differs from its note means: make the result again, then note its inputs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

from kvtax.paths import REPOSITORY

LOCK = "inputs.lock"
# Results in virtual time, whose tables have their inputs among other fields.
FLEET_LOCK = "fleet/results.lock"
HEADER = (
    "# Made by `python -m tools.inputs RESULT INPUT...`: inputs of committed results.\n"
)
Notes = dict[str, dict[str, str]]


class InputsError(Exception):
    """An input or a result that git does not have; the message names it."""


def git(*arguments: str, repository: Path = REPOSITORY) -> bytes:
    """Return what a git command prints. Raises InputsError."""
    command = ["git", "-C", str(repository), *arguments]
    ended = subprocess.run(command, capture_output=True)
    if ended.returncode:
        raise InputsError(ended.stderr.decode(errors="replace").strip())
    return ended.stdout


def _digest(contents: dict[str, bytes]) -> str:
    """Return the SHA-256 of a file, or of a folder's names and files."""
    if len(contents) == 1:
        return hashlib.sha256(*contents.values()).hexdigest()
    lines = [
        f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for name, content in sorted(contents.items())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digest_at_head(path: str, repository: Path = REPOSITORY) -> str | None:
    """Return the SHA-256 of a file or folder at HEAD, None if it is not there."""
    listed = git(
        "ls-tree", "-r", "-z", "--name-only", "HEAD", path, repository=repository
    )
    names = [name for name in listed.decode().split("\0") if name]
    contents = {
        name: git("show", f"HEAD:{name}", repository=repository) for name in names
    }
    return _digest(contents) if contents else None


def digest_here(path: str, repository: Path = REPOSITORY) -> str:
    """Return the SHA-256 of a file or a folder's tracked files. Raises InputsError."""
    listed = git("ls-files", "-z", "--", path, repository=repository).decode()
    names = [name for name in listed.split("\0") if name]
    if not names:
        raise InputsError(f"{path}: git has no such file; `git add` it first")
    return _digest({name: (repository / name).read_bytes() for name in names})


def read_notes(repository: Path = REPOSITORY) -> Notes:
    """Return each result's inputs with their SHA-256, as committed."""
    notes: Notes = {}
    for lock in (LOCK, FLEET_LOCK):
        try:
            text = git("show", f"HEAD:{lock}", repository=repository).decode()
        except InputsError:
            continue
        for result, table in tomllib.loads(text).items():
            notes[result] = table.get("inputs", {}) if lock == FLEET_LOCK else table
    return notes


def stale(repository: Path = REPOSITORY) -> list[str]:
    """Return a line for each noted input that HEAD does not have as noted."""
    lines = []
    for result, inputs in read_notes(repository).items():
        for path, noted in inputs.items():
            now = digest_at_head(path, repository)
            if now is None:
                lines.append(f"{result}: its input {path} is not committed")
            elif now != noted:
                lines.append(
                    f"{result}: its input {path} has changed since: make it again"
                )
    return lines


def note(result: str, inputs: list[str], repository: Path = REPOSITORY) -> None:
    """Write the inputs of a result, as they are here, to LOCK. Raises InputsError."""
    digest_here(result, repository)
    file = repository / LOCK
    notes: Notes = tomllib.loads(file.read_text()) if file.exists() else {}
    notes[result] = {path: digest_here(path, repository) for path in sorted(inputs)}
    file.write_text(
        HEADER
        + "".join(
            f'\n["{name}"]\n' + "".join(f'"{p}" = "{d}"\n' for p, d in table.items())
            for name, table in sorted(notes.items())
        )
    )


def main(arguments: list[str]) -> int:
    """Note a result's inputs, or check all. Return the exit code."""
    try:
        if arguments:
            result, *inputs = arguments
            if not inputs:
                raise InputsError(f"{result}: name its inputs, too")
            note(result, inputs)
            return 0
        lines = stale()
    except InputsError as error:
        print(f"inputs: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(f"inputs: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
