# SPDX-License-Identifier: Apache-2.0
"""Named tasks, done on the hosts of a Ray cluster, and the folders that they made.

With a store the hosts put results there, and what it already has of this work is not
done again. Otherwise results come through Ray.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import msgspec

from kvtax.hosts.code import code
from kvtax.hosts.driver import spread
from kvtax.hosts.progress import Progress
from kvtax.hosts.results import Place, PlaceOf, Result, Unstored, nowhere, unpack
from kvtax.hosts.store import Piece, Store


@dataclass(frozen=True)
class Work:
    """Tasks by name, done by `python -m MODULE` (kvtax.hosts.worker) beside `files`.

    With `alone` a host does one at a time.
    """

    module: str
    files: dict[str, bytes]
    tasks: dict[str, bytes]
    alone: bool = False

    def sha256(self, name: str) -> str:
        """Hash all that decides the result of a task, our code included."""
        return hashlib.sha256(self._common + self.tasks[name]).hexdigest()

    @cached_property
    def _common(self) -> bytes:
        common = [self.module, sorted(self.files.items()), code()]
        return hashlib.sha256(msgspec.msgpack.encode(common)).digest()


@dataclass(frozen=True)
class FinishedTask:
    """A task's name, the host that did it, and the folder it made, to be moved."""

    name: str
    host: str
    folder: Path


def finished_tasks(
    address: str,
    work: Work,
    aside: Path,
    store: Store | None = None,
    is_good: Callable[[str, Path], bool] = lambda name, folder: True,
) -> Iterator[FinishedTask]:
    """Yield all tasks of `work`, as they are done on the cluster at `address`.

    Folders are made in `aside`. What the `store` has comes first, if `is_good` of a
    task's name and folder. Raises HostsError and StoreError.
    """
    with TemporaryDirectory(dir=aside) as made:
        folder = Path(made)
        stored = set()
        for task in _stored(work, folder, store):
            if is_good(task.name, task.folder):
                stored.add(task.name)
                yield task
        names = [name for name in work.tasks if name not in stored]
        if not names:
            return
        with Progress(names) as progress:
            for task in _done(address, work, names, folder, store, progress):
                if not is_good(task.name, task.folder):
                    progress.failed(task.host)
                yield task


def _stored(work: Work, aside: Path, store: Store | None) -> Iterator[FinishedTask]:
    pieces = {} if store is None else store.pieces()
    for name in work.tasks:
        if name in pieces and pieces[name].work == work.sha256(name):
            host = pieces[name].host
            made = _folder(pieces[name], name, host, aside, store)
            yield FinishedTask(name, host, made)


@dataclass(frozen=True)
class _Places:
    """Place of tasks' results in the store at `url`; picklable."""

    url: str
    mark: str
    names: list[str]
    works: list[str]

    def __call__(self, task: int, host: str) -> Place:
        return Place(self.url, self.mark, self.names[task], self.works[task], host)


def _done(
    address: str,
    work: Work,
    names: list[str],
    aside: Path,
    store: Store | None,
    progress: Progress,
) -> Iterator[FinishedTask]:
    place: PlaceOf = nowhere
    if store is not None:
        works = [work.sha256(name) for name in names]
        place = _Places(store.url, store.word, names, works)
    tasks = [work.tasks[name] for name in names]
    for task, host, result in spread(
        address, work.module, work.files, tasks, work.alone, place, progress
    ):
        name = names[task]
        if isinstance(result, Unstored):
            print(
                f"{name} of {host} came here, and is not in the store: {result.why}",
                file=sys.stderr,
            )
        yield FinishedTask(name, host, _folder(result, name, host, aside, store))


def _folder(
    result: Result, name: str, host: str, aside: Path, store: Store | None
) -> Path:
    if isinstance(result, Piece):
        into = Path(mkdtemp(dir=aside)) / "made"
        if store is None:
            raise RuntimeError(f"{name} is in a store, and none was given")
        store.fetch(name, result, into)
        return into
    packed = result.packed if isinstance(result, Unstored) else result
    return unpack(packed, aside, f"{name} of {host}")
