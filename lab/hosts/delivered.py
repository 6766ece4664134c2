# SPDX-License-Identifier: Apache-2.0
"""Named work, done on the hosts of a Ray cluster, and the folders that came out of it.

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

from lab.hosts.apart import spread
from lab.hosts.code import code
from lab.hosts.place import Place, Result, Unstored, at_hand
from lab.hosts.progress import Progress
from lab.hosts.unpack import unpack
from lab.store.piece import Piece
from lab.store.store import Store


@dataclass(frozen=True)
class Work:
    """What lab.hosts.agent does: `tasks` by name, by `module` beside `files`.

    With `alone` a host does one at a time.
    """

    module: str
    files: dict[str, bytes]
    tasks: dict[str, bytes]
    alone: bool = False

    def sha256(self, name: str) -> str:
        """Of all that decides what comes out of a task, our code among it."""
        return hashlib.sha256(self._common + self.tasks[name]).hexdigest()

    @cached_property
    def _common(self) -> bytes:
        common = [self.module, sorted(self.files.items()), code()]
        return hashlib.sha256(msgspec.msgpack.encode(common)).digest()


@dataclass(frozen=True)
class Delivered:
    """A task's name, who did it, and the folder with what came out, to be moved."""

    name: str
    host: str
    folder: Path


def delivered(
    address: str,
    work: Work,
    aside: Path,
    store: Store | None,
    good: Callable[[str, Path], bool],
) -> Iterator[Delivered]:
    """All tasks of `work`, as they are done on the cluster at `address`.

    Folders are made in `aside`. What the `store` has comes first, if it is `good`: by a
    task's name and what came out of it. Raises HostsError and StoreError.
    """
    with TemporaryDirectory(dir=aside) as made:
        folder = Path(made)
        there = set()
        for one in _stored(work, folder, store):
            if good(one.name, one.folder):
                there.add(one.name)
                yield one
        names = [name for name in work.tasks if name not in there]
        if not names:
            return
        with Progress(names) as progress:
            for one in _done(address, work, names, folder, store, progress):
                if not good(one.name, one.folder):
                    progress.failed(one.host)
                yield one


def _stored(work: Work, aside: Path, store: Store | None) -> Iterator[Delivered]:
    pieces = {} if store is None else store.pieces()
    for name in work.tasks:
        if name in pieces and pieces[name].work == work.sha256(name):
            made = _folder(pieces[name], name, aside, store)
            yield Delivered(name, pieces[name].host, made)


@dataclass(frozen=True)
class _Places:
    """Where in the store at `url` the results of tasks go; picklable."""

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
) -> Iterator[Delivered]:
    place = at_hand
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
        yield Delivered(name, host, _folder(result, name, aside, store))


def _folder(result: Result, name: str, aside: Path, store: Store | None) -> Path:
    if isinstance(result, Piece):
        into = Path(mkdtemp(dir=aside)) / "made"
        store.fetch(name, result, into)
        return into
    return unpack(result.packed if isinstance(result, Unstored) else result, aside)
