# SPDX-License-Identifier: Apache-2.0
"""Where the result of a task goes: into a store, or back to who asked for it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from lab.hosts.errors import HostRefused
from lab.store.errors import StoreError
from lab.store.piece import Piece


class Place(msgspec.Struct, frozen=True):
    """The piece `name` of the store at `url`; `mark` is the word of Store.mark.

    `work` and `host` are for the piece's manifest.
    """

    url: str
    mark: str
    name: str
    work: str
    host: str


class Unstored(msgspec.Struct, frozen=True):
    """A result, as a tar file, that the store did not take, and why."""

    packed: bytes
    why: str


# Without a store the result itself, as a tar file.
Result = bytes | Piece | Unstored
# Where a task's result goes that is made by the host of this name.
PlaceOf = Callable[[int, str], Place | None]


def at_hand(task: int, host: str) -> None:
    """Results come to us."""


def require(place: Place) -> None:
    """Raises HostRefused if the host does not see the store that is meant."""
    _require(place.url, place.mark)


@cache
def _require(url: str, mark: str) -> None:
    from lab.store.store import Store

    try:
        Store(url).require_mark(mark)
    except StoreError as error:
        raise HostRefused(
            f"{error}; name a folder that all hosts share, or an object store that all "
            "may use"
        ) from None


def put(result: Path, place: Place | None) -> Result:
    """The files of the folder `result` are in their place then, or in what is returned.

    A result that the store refuses is not lost: it is handed over.
    """
    if place is None:
        return _pack(result)
    from lab.store.store import Store

    try:
        return Store(place.url).put(place.name, result, place.work, place.host)
    except StoreError as error:
        return Unstored(_pack(result), str(error))


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=".")
    return packed.getvalue()
