# SPDX-License-Identifier: Apache-2.0
"""A task's result, a folder: where its host puts it, and how it is unpacked."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from kvtax.hosts.errors import HostRefused, StoreError
from kvtax.hosts.store import Piece, Store, unpack_tar


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
# Place of a task's result that the host of this name makes; None without a store.
PlaceOf = Callable[[int, str], Place | None]


def nowhere(task: int, host: str) -> None:
    """Have results come through Ray."""


@cache
def require_store(url: str, mark: str) -> None:
    """Raise HostRefused if the host does not see the store that is meant."""
    try:
        Store(url).require_mark(mark)
    except StoreError as error:
        raise HostRefused(
            f"{error}; name a folder that all hosts share, or an object store that all "
            "may use"
        ) from None


def put(result: Path, place: Place | None) -> Result:
    """Put the files of the folder `result` into their place, or return them.

    A result that the store refuses is not lost: it is handed over.
    """
    if place is None:
        return _pack(result)
    try:
        return Store(place.url).put(place.name, result, place.work, place.host)
    except StoreError as error:
        return Unstored(_pack(result), str(error))


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=".")
    return packed.getvalue()


def unpack(packed: bytes, aside: Path, source: str) -> Path:
    """Unpack the folder into a new one in `aside`; raise StoreError if it is no result.

    `source` names the result in the error.
    """
    made = Path(tempfile.mkdtemp(dir=aside)) / "made"
    unpack_tar(io.BytesIO(packed), made, source)
    return made
