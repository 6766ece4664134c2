# SPDX-License-Identifier: Apache-2.0
"""Make results in virtual time again and compare them with fleet/results.lock.

    python -m tools.locked_results [NAME ...]          all without a NAME
    python -m tools.locked_results --lock NAME ...     promise what is made now
    python -m tools.locked_results --lock NAME --run DIR    the same of a finished run

NAME is an experiment of fleet/configs/experiments/. Its result goes to
fleet/results/NAME, which git ignores. Two runs of the same experiment give the same
bytes but for their provenance, so a hash that differs means that the code measures
something else now.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from kvtax_fleet.experiment.config import read_experiment
from kvtax_fleet.paths import CONFIGS, FLEET

from kvtax.paths import REPOSITORY
from tools.inputs import FLEET_LOCK, digest_here

LOCK = REPOSITORY / FLEET_LOCK
RESULTS = FLEET / "results"
# Fields of analysis.json that say by whom and with what it was made, and the ranking,
# which sums up the rest.
LEFT_OUT = {"made", "ranking"}
# The warning that does, too.
UNCOMMITTED = "uncommitted"
HEADER = """\
# Results in virtual time that `make results` makes again and compares.
# commit: of the code that made the result; sha256: of analysis.json without its
# provenance (tools.locked_results); inputs: what it was made from, with their SHA-256.
"""


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A result that fleet/results.lock promises."""

    commit: str
    sha256: str
    inputs: dict[str, str]


class ResultsError(Exception):
    """A result cannot be made, or differs; the message says which."""


def read_lock(path: Path = LOCK) -> dict[str, Locked]:
    """Read the promised results, by name."""
    return msgspec.convert(tomllib.loads(path.read_text()), dict[str, Locked])


def write_lock(locked: dict[str, Locked], path: Path = LOCK) -> None:
    """Write the promised results in the order of their names."""
    text = HEADER
    for name, entry in sorted(locked.items()):
        text += f'\n[{name}]\ncommit = "{entry.commit}"\nsha256 = "{entry.sha256}"\n'
        text += f"\n[{name}.inputs]\n"
        text += "".join(f'"{file}" = "{sha}"\n' for file, sha in entry.inputs.items())
    path.write_text(text)


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


def config_of(name: str) -> Path:
    """Return the file of an experiment."""
    return CONFIGS / "experiments" / f"{name}.toml"


def inputs_of(name: str) -> dict[str, str]:
    """Return the files that an experiment is made from, with their SHA-256."""
    experiment = read_experiment(config_of(name))
    files = [
        config_of(name),
        FLEET / experiment.workload.trace,
        CONFIGS / "profiles" / f"{experiment.profile}.toml",
    ]
    if experiment.virtual.host is not None:
        files.append(CONFIGS / "hosts" / f"{experiment.virtual.host}.json")
    paths = sorted(str(file.relative_to(REPOSITORY)) for file in files)
    return {path: digest_here(path) for path in paths}


def make(name: str, folder: Path) -> None:
    """Run the experiment into `folder`. Raises ResultsError."""
    shutil.rmtree(folder, ignore_errors=True)
    experiment = str(config_of(name))
    command = [sys.executable, "-m", "kvtax", "fleet", experiment, "--virtual"]
    ended = subprocess.run([*command, "--out", str(folder)], cwd=REPOSITORY)
    if ended.returncode:
        raise ResultsError(f"{name}: kvtax fleet ended with {ended.returncode}")


def check(name: str, locked: Locked, folder: Path) -> None:
    """Compare a made result with its promise. Raises ResultsError."""
    made = fingerprint(folder / "analysis.json")
    if made != locked.sha256:
        raise ResultsError(
            f"{name}: {folder / 'analysis.json'} has SHA-256 {made} without its "
            f"provenance, results.lock has {locked.sha256} (of {locked.commit[:12]}). "
            "If the change is meant, run this with --lock."
        )


def promise(name: str, run: Path) -> Locked:
    """Return the promise of a finished run. Raises ResultsError."""
    versions = json.loads((run / "analysis.json").read_text())["made"]["versions"]
    if versions.get("git_dirty"):
        raise ResultsError(
            f"{name}: its tree had uncommitted changes: commit, run again"
        )
    sha256 = fingerprint(run / "analysis.json")
    return Locked(versions["git_commit"], sha256, inputs_of(name))


def main(arguments: Iterable[str] | None = None) -> int:
    """Make the named results, or all; return 1 if one differs, 2 for an unknown one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--lock", action="store_true", help="promise what is made now")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="with --lock: a finished run of NAME"
    )
    options = parser.parse_args(None if arguments is None else [*arguments])
    lock = read_lock()
    known = {file.stem for file in config_of("*").parent.glob("*.toml")}
    there = known if options.lock else lock.keys()
    if unknown := [name for name in options.names if name not in there]:
        print(f"results: no {', '.join(unknown)}; there are {', '.join(sorted(there))}")
        return 2
    if options.run and (not options.lock or len(options.names) != 1):
        parser.error("--run is of one NAME, with --lock")
    status = 0
    for name in options.names or list(lock):
        folder = options.run or RESULTS / name
        try:
            if not options.run:
                make(name, folder)
            if options.lock:
                lock[name] = promise(name, folder)
                write_lock(lock)
            else:
                check(name, lock[name], folder)
        except ResultsError as error:
            print(f"results: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"results: {name} is as promised, in {folder}")
    return status


if __name__ == "__main__":
    sys.exit(main())
