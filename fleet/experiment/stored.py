# SPDX-License-Identifier: Apache-2.0
"""Runs in real time, of which a store has a copy: their folder may be lost."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleet.experiment.arm import ExperimentContext, MakeRuns
from fleet.experiment.outcome import finished
from fleet.experiment.plan import Run
from lab.hosts.code import code
from lab.records.arm import PlannedArm
from lab.store.errors import StoreError
from lab.store.store import Store


def make_or_fetch(
    make: MakeRuns,
    store: Store,
    hosts: int | None,
    context: ExperimentContext,
    runs: list[tuple[Run, PlannedArm]],
    out: Path,
) -> Iterator[Path]:
    """As `make`, but what `store` has is fetched, and what went well is put there.

    Fleets are on so many `hosts` of a cluster. Raises StoreError, and what `make` does.
    """
    here = platform.node()
    # Not a piece's own: all runs of an experiment are of one kind, or not compared.
    work = _sha256(context, hosts, here)
    pieces = store.pieces()
    if any(piece.work != work for piece in pieces.values()):
        raise StoreError(
            f"{store.url} has runs of another experiment, code, packages, host of the "
            "command or number of hosts: give another --out; python -m lab.store fetch "
            f"{store.url} FOLDER takes what is there"
        )
    for run, _ in runs:
        if run.folder in pieces:
            folder = out / run.folder
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            store.fetch(run.folder, pieces[run.folder], folder)
            yield folder
    rest = [(run, planned) for run, planned in runs if run.folder not in pieces]
    for folder in make(context, rest, out):
        if finished(folder):
            _put(store, str(folder.relative_to(out)), folder, work, here)
        yield folder


def _put(store: Store, name: str, folder: Path, work: str, host: str) -> None:
    try:
        store.put(name, folder, work, host)
    except StoreError as error:
        print(f"{name} is in {folder}, and not in the store: {error}", file=sys.stderr)


def _sha256(context: ExperimentContext, hosts: int | None, here: str) -> str:
    trace = hashlib.sha256(context.trace.read_bytes()).digest()
    parts = [context.experiment, trace, code(), hosts, here]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()
