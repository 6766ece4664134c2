# SPDX-License-Identifier: Apache-2.0
"""Finished pieces of work, in a folder or an object store that many hosts reach.

    URL/NAME.TOKEN.tar      the files of the piece NAME
    URL/NAME.piece.json     its manifest, written last: which tar, how long, which hash

A tar is written once, under a name of its own. A reader takes what a manifest names and
what has its hash. So a piece is there whole or not at all, and two hosts that made the
same one do not disturb each other.

Whoever may write to the store may write anything: names and tars are checked, so that
they can make nothing but new data files below the folder that a reader chose.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import all_suffixes
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn, Protocol, TypeVar, cast

import msgspec

from kvtax.engine.provenance import MASK, masked
from kvtax.hosts.errors import StoreError, StoreUrlError

MANIFEST, MARK = ".piece.json", ".mark"
# A store that refuses for so long is given up.
PATIENCE_S = 300.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
BLOCK_BYTES = 8 << 20
# To wait would not help.
HOPELESS = (FileNotFoundError, PermissionError, ImportError)
# Python would run such files if they came to lie in a folder that it imports from.
CODE_SUFFIXES = (*all_suffixes(), ".pth")
# A colon that begins no port, and an @ after it: a password may have / in it.
PASSWORD = re.compile(r"://[^/@]*:(?!\d+(/|$))\S*@")
Result = TypeVar("Result")


class Piece(msgspec.Struct, frozen=True):
    """The manifest of a piece.

    `file` is the name of its tar, beside the manifest; `work` the hash of the work
    that it is the result of, `host` who made it.
    """

    work: str
    host: str
    put_at: str
    file: str
    bytes: int
    sha256: str


class Store:
    """The pieces below `url`, any that fsspec knows: a folder, file://, s3://.

    All methods raise StoreError: where the store refuses, after PATIENCE_S, but for
    `mark`, which does not wait. A URL that can be none raises StoreUrlError.
    """

    def __init__(self, url: str) -> None:
        if PASSWORD.search(url) or f"={MASK}" in masked(url):
            raise StoreUrlError(
                f"{masked(url)} has a password, and all users of this machine can read "
                "command lines: leave it to the environment (docs/hosts.md)"
            )
        # Agents on hosts import this module, most of them for work without a store.
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise StoreUrlError(f"{url}: {error}") from None
        # s3fs would try each request five times, in each of our tries.
        self._files.retries = 1
        # A folder's path is then a whole one.
        self.url = self._files.unstrip_protocol(self._root)
        self._is_folder = isinstance(self._files, LocalFileSystem)
        self.word = ""

    def require(self) -> None:
        """Raise StoreUrlError if nothing is there: a reader's URL has a slip."""
        if not self._patiently(lambda: self._files.exists(self._root)):
            raise StoreUrlError(f"{self.url}: nothing is there; check the URL")

    def put(self, name: str, folder: Path, work: str, host: str) -> Piece:
        """Put the files of `folder` there, read them back, and then say so."""
        return self._patiently(lambda: self._put(name, folder, work, host))

    def pieces(self) -> dict[str, Piece]:
        """Read the manifests, by the pieces' names.

        A name is a relative path without `..`, `file` a plain name.
        """
        pieces = self._patiently(self._pieces)
        for name, piece in pieces.items():
            if _leaves(name) or not PurePosixPath(name).parts:
                self._refuse(name, "its name leaves the folder that it is fetched to")
            if _leaves(piece.file) or PurePosixPath(piece.file).parts != (piece.file,):
                self._refuse(name, f"its tar is {piece.file!r}, not a file beside it")
        return pieces

    def fetch(self, name: str, piece: Piece, into: Path) -> None:
        """Make the folder `into` of the piece's files, whole or not at all."""
        path = self._beside(name, piece.file)
        with tempfile.TemporaryDirectory(dir=into.parent) as aside:
            packed, made = Path(aside, "tar"), Path(aside, "made")
            self._patiently(lambda: self._files.get_file(path, str(packed)))
            with packed.open("rb") as file:
                there = packed.stat().st_size, _sha256(file)
            if there != (piece.bytes, piece.sha256):
                raise StoreError(
                    f"{self.url}: {name} is not what {piece.host} put there: delete "
                    f"{name}{MANIFEST}, and it is made again with --resume"
                )
            with packed.open("rb") as file:
                unpack_tar(file, made, f"{self.url}: {name}")
            made.rename(into)

    def mark(self) -> None:
        """Leave a new `word` there, for others to see that this is the store meant."""
        self.word = uuid.uuid4().hex
        try:
            self._write_whole(f"{self._root}/{MARK}", self.word.encode())
        except Exception as error:
            raise StoreError(
                f"cannot write to {self.url}: {_in_short(error)}"
            ) from None

    def require_mark(self, word: str) -> None:
        """Raise StoreError if the `word` of mark() is not seen from here."""
        path = f"{self._root}/{MARK}"
        if self._patiently(lambda: self._files.cat_file(path)) != word.encode():
            raise StoreError(f"{self.url}: another command has begun to write there")

    def _put(self, name: str, folder: Path, work: str, host: str) -> Piece:
        path = self._beside(name, f"{Path(name).name}.{uuid.uuid4().hex[:12]}.tar")
        try:
            self._make_room(path)
            with self._files.open(path, "wb", block_size=BLOCK_BYTES) as file:
                hashed = _Hashed(file)
                # A tar that is only written needs no more of it; the stubs ask for all.
                whole = cast(IO[bytes], hashed)
                with tarfile.open(fileobj=whole, mode="w|") as tar:
                    tar.add(folder, arcname=".")
            with self._files.open(path, "rb", block_size=BLOCK_BYTES) as file:
                if _sha256(file) != hashed.sha256:
                    raise OSError("what is read back is not what was written")
            piece = Piece(
                work=work,
                host=host,
                put_at=datetime.datetime.now(datetime.UTC).isoformat(
                    timespec="seconds"
                ),
                file=Path(path).name,
                bytes=hashed.bytes,
                sha256=hashed.sha256,
            )
            manifest = msgspec.json.format(msgspec.json.encode(piece))
            self._write_whole(f"{self._root}/{name}{MANIFEST}", manifest)
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(path)
            raise
        return piece

    def _pieces(self) -> dict[str, Piece]:
        paths = [
            path for path in self._files.find(self._root) if path.endswith(MANIFEST)
        ]
        contents = self._files.cat(sorted(paths)) if paths else {}
        pieces = {}
        for path, content in contents.items():
            # A store that is no S3 may show half a file: half an object is no JSON.
            with suppress(msgspec.DecodeError):
                name = path.removeprefix(self._root).removeprefix("/")
                name = name.removesuffix(MANIFEST)
                pieces[name] = msgspec.json.decode(content, type=Piece)
        return pieces

    def _write_whole(self, path: str, content: bytes) -> None:
        """Write `path` whole or not at all: an object, or a new name in a folder."""
        if not self._is_folder:
            self._files.pipe_file(path, content)
            return
        self._make_room(path)
        partial = f"{path}.{uuid.uuid4().hex[:12]}.partial"
        self._files.pipe_file(partial, content)
        self._files.mv(partial, path)

    def _make_room(self, path: str) -> None:
        # To S3 this could mean a new bucket.
        if self._is_folder:
            self._files.makedirs(str(Path(path).parent), exist_ok=True)

    def _beside(self, name: str, file: str) -> str:
        """Return the path of `file` beside the manifest of `name`."""
        return f"{self._root}/{Path(name).with_name(file)}"

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise StoreError(
            f"{self.url}: {name + MANIFEST!r} is refused: {why}; find out who may "
            "write there, and delete it"
        )

    def _patiently(self, do: Callable[[], Result]) -> Result:
        deadline_s, wait_s = time.monotonic() + PATIENCE_S, FIRST_WAIT_S
        while True:
            try:
                return do()
            except HOPELESS as error:
                raise StoreError(f"{self.url}: {_in_short(error)}") from None
            # What goes wrong at S3 is told by exceptions of botocore and of aiohttp.
            except Exception as error:
                if time.monotonic() + wait_s > deadline_s:
                    raise StoreError(
                        f"{self.url} refused for {PATIENCE_S:.0f} s: {_in_short(error)}"
                    ) from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def store_of_run(url: str, run: str, resume: bool) -> Store:
    """Open the store of the run of that name, below `url`.

    Raises StoreError if it cannot be written to, or has a run that is not resumed.
    """
    store = Store(f"{url.rstrip('/')}/{run}")
    store.mark()
    if not resume and store.pieces():
        raise StoreError(
            f"{store.url} holds a run already: add --resume, or another --out"
        )
    return store


def unpack_tar(packed: IO[bytes], into: Path, source: str) -> None:
    """Make the folder `into` of a tar of files and folders.

    Raises StoreError, which names `source` and the member, before anything is written
    if a member is neither, would leave `into`, or is code that Python could import.
    `extractall` is not used: before Python 3.11.13, 3.12.11 and 3.13.4 its filters let
    links out of the folder.
    """
    try:
        # Compressed ones, which may unpack to anything, are not read.
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            members = tar.getmembers()
            for member in members:
                if why := _refusal(member):
                    raise StoreError(
                        f"{source}: member {member.name!r} of its tar is refused: "
                        f"{why}; find out who may write there, delete it, and make "
                        "the result again (--resume)"
                    )
            into.mkdir()
            for member in members:
                _unpack_member(tar, member, into / member.name)
    except (tarfile.TarError, OSError) as error:
        raise StoreError(
            f"{source}: its tar cannot be unpacked ({_in_short(error)}); if this disk "
            "has room, delete the tar and make the result again (--resume)"
        ) from None


def _refusal(member: tarfile.TarInfo) -> str | None:
    if _leaves(member.name):
        return "it leaves the folder"
    if member.isdir():
        return None
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse:
        return "it is neither a plain file nor a folder"
    if member.name.lower().endswith(CODE_SUFFIXES):
        return "Python could run it, and results are data"
    return None


def _leaves(name: str) -> bool:
    """Return whether a path may lead out of the folder that it is put in."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or not name.isprintable()


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    if member.isdir():
        into.mkdir(parents=True, exist_ok=True)
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, "plain files have contents"
    # A name that comes twice is refused, not written over.
    with content, into.open("xb") as file:
        shutil.copyfileobj(content, file)


class _Hashed:
    """A file to write to, which knows how much was written, and its hash."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class _Readable(Protocol):
    """A file that can be hashed."""

    def readable(self) -> bool: ...

    def readinto(self, buffer: bytearray, /) -> int: ...


def _sha256(file: _Readable) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
