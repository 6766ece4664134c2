# SPDX-License-Identifier: Apache-2.0
"""Make results in virtual time again and compare them with fleet/results.lock.

    python -m tools.locked_results [NAME ...]     all without a NAME

A result goes to fleet/results/NAME, which git ignores. Two runs of the same experiment
give the same bytes but for their provenance, so a hash that differs means that the code
measures something else now.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
from kvtax_fleet.paths import FLEET

from kvtax.paths import REPOSITORY

LOCK = FLEET / "results.lock"
RESULTS = FLEET / "results"
# Fields of analysis.json that say by whom and with what it was made, and the ranking,
# which sums up the rest.
LEFT_OUT = {"made", "ranking"}
# The warning that does, too.
UNCOMMITTED = "uncommitted"


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result that fleet/results.lock promises."""

    experiment: str
    commit: str
    sha256: str


class ResultsError(Exception):
    """A result cannot be made, or differs; the message says which."""


def read_lock(path: Path = LOCK) -> dict[str, Locked]:
    """Read the promised results, by name."""
    return msgspec.convert(tomllib.loads(path.read_text()), dict[str, Locked])


def fingerprint(analysis: Path) -> str:
    """Compute the SHA-256 of an analysis.json without LEFT_OUT."""
    document = json.loads(analysis.read_text())
    numbers = {name: document[name] for name in document.keys() - LEFT_OUT}
    numbers["warnings"] = [
        warning
        for warning in document.get("warnings", [])
        if warning["kind"] != UNCOMMITTED
    ]
    canonical = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def make(name: str, locked: Locked, folder: Path) -> None:
    """Run the experiment into `folder` and compare. Raises ResultsError."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "kvtax", "fleet", locked.experiment, "--virtual"]
    ended = subprocess.run([*command, "--out", str(folder)], cwd=REPOSITORY)
    if ended.returncode:
        raise ResultsError(f"{name}: kvtax fleet ended with {ended.returncode}")
    if (found := fingerprint(folder / "analysis.json")) != locked.sha256:
        raise ResultsError(
            f"{name}: {folder / 'analysis.json'} has SHA-256 {found} without its "
            f"provenance, results.lock has {locked.sha256} (of {locked.commit[:12]}). "
            "If the change is meant, put the new hash and commit there."
        )


def main(names: list[str]) -> int:
    """Make the named results, or all; return 1 if one differs, 2 for an unknown one."""
    lock = read_lock()
    if unknown := [name for name in names if name not in lock]:
        print(f"results: no {', '.join(unknown)}; there are {', '.join(lock)}")
        return 2
    status = 0
    for name in names or list(lock):
        try:
            make(name, lock[name], RESULTS / name)
        except ResultsError as error:
            print(f"results: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"results: {name} is as promised, in fleet/results/{name}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
