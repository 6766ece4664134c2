# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: a new one, or an earlier run to go on with."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvtax.paths import REPOSITORY
from kvtax.proc.user_files import LockHeld, user_lock

# What a run must not mix; that of an earlier part of it is in its provenance.
SAME_MACHINE_AND_CODE = ("package_versions", "host", "git_commit")


class RunFolderError(Exception):
    """The folder cannot be used for this run; the message says what to do."""

    exit_code = 2


def choose(given: Path | None, name: str, plan_file: str, resume: bool) -> Path:
    """Choose the folder: `given`, or runs/<time>-<name>. Make nothing.

    `plan_file` is the file that a folder has if a run was begun in it.
    Raises RunFolderError if it holds a run that is not to be resumed, or none that is.
    """
    if given is not None and given.exists() and not given.is_dir():
        raise RunFolderError(f"{given} is a file: --out wants a folder")
    holds_a_run = given is not None and (given / plan_file).exists()
    if resume and not holds_a_run:
        raise RunFolderError("--resume needs --out and the folder of a run to resume")
    if holds_a_run and not resume:
        raise RunFolderError(
            f"{given} holds a run already: add --resume, or another --out"
        )
    if given is None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        given = REPOSITORY / "runs" / f"{now}-{name}"
    return given.resolve()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder for one run at a time on this machine. Raises RunFolderError."""
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
    try:
        with user_lock(f"kvtax-run-{name}.lock"):
            yield
    except LockHeld as error:
        raise RunFolderError(
            f"{folder}: process {error.pid} makes a run there; wait for its end, or "
            "give another --out"
        ) from None


def read_plan(file: Path) -> dict[str, Any]:
    """Read the plan document of an earlier run. Raises RunFolderError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise RunFolderError(
            f"cannot resume {file.parent}: {file.name} cannot be read: {error}"
        ) from None


def _differing(before: Any, now: Any) -> str:
    """Name the fields that differ, if both are tables."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return ""
    names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return f" in {', '.join(f'`{name}`' for name in names)}"


def check_resumable(
    folder: Path,
    earlier: Mapping[str, Any],
    now: Mapping[str, Any],
    plan_keys: Iterable[str],
    provenance_keys: Iterable[str] = SAME_MACHINE_AND_CODE,
    provenance: str = "provenance",
) -> None:
    """May the run that `earlier` describes go on as `now`?

    Both are the run's plan document. Raises RunFolderError unless `plan_keys` of the
    two are equal, and `provenance_keys` of what stands under `provenance`.
    """
    for key in plan_keys:
        before = earlier.get(key)
        if before != now[key]:
            parts = _differing(before, now[key])
            raise RunFolderError(
                f"cannot resume {folder}: its {key} is another{parts}: give another "
                "--out"
            )
    before = earlier.get(provenance) or {}
    for key in sorted(provenance_keys):
        if before.get(key) != now[provenance][key]:
            raise RunFolderError(
                f"cannot resume {folder}: {key} has changed since, and a run must not "
                "mix the two"
            )
