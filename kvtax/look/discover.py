# SPDX-License-Identifier: Apache-2.0
"""Servers whose records lie in a folder, and one clock for all of them.

Records of many servers may exceed the memory, so servers are discovered first, and
their steps are read one after the other.

Records are of CLOCK_MONOTONIC, which the processes of a host share and hosts do not.
Each file names its kernel and the wall clock at its beginning, so another host's
moments can be shifted, as exactly as the two wall clocks agree.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvtax.records import RecordsError
from kvtax.records.files import read_header
from kvtax.records.parts import parts_of, whole
from kvtax.records.steps import STEPS, EngineHeader, first_step
from kvtax.records.warning import RECORD, RunWarning, Warn, encodable

# Names of files of steps, also rotated or compressed ones.
STEP_FILES = f"{STEPS}*"
# Name of the folder that the recorder makes for each life of an engine.
LIFE = re.compile(r"\d{8}T\d{6}\.\d+Z-(?P<host>.+)-dp(?P<rank>\d+)-(?P<pid>\d+)")


@dataclass(frozen=True)
class ServerFiles:
    """One engine lifetime: its engine_step.jsonl, and when its first step began."""

    name: str
    path: Path
    header: EngineHeader
    first_ns: int | None


def engine_of(folder: Path, path: Path) -> str:
    """Name the engine of which a file below `folder` is: it may have many lives."""
    name = name_of(folder, path)
    life = LIFE.fullmatch(path.parent.name)
    if life is None:
        return name
    return name.removesuffix(path.parent.name) + f"{life['host']}-dp{life['rank']}"


def discover(folder: Path) -> tuple[list[ServerFiles], list[RunWarning]]:
    """List all instances below `folder`, and the faults of those that cannot be read.

    Raises RecordsError if there are no step records at all.
    """
    if folder.is_file():
        raise RecordsError(f"{folder}: is a file; of records, name their folder")
    if not folder.is_dir():
        raise RecordsError(f"{folder}: no such directory")
    errors: list[OSError] = []
    there = files_below(folder, STEP_FILES, errors.append)
    paths = sorted({path for path in map(whole, there) if path.name == STEPS})
    # A folder may be removed meanwhile.
    closed = [error for error in errors if not isinstance(error, FileNotFoundError)]
    if not paths:
        if closed:
            raise RecordsError(f"{closed[0].filename}: {closed[0].strerror}")
        raise RecordsError(
            f"{folder}: no engine_step.jsonl here or below; was the server started "
            f"with KVTAX_STEP_RECORDS_DIR? {RECORD}"
        )
    servers = []
    warnings = [
        _unreadable(name_of(folder, Path(error.filename, "*")), error)
        for error in closed
    ]
    for path in paths:
        name = name_of(folder, path)
        try:
            servers.append(_server(name, path))
        except RecordsError as error:
            warnings.append(_unreadable(name, error))
    servers, copies = _each_life_once(servers)
    warnings += copies
    releases = {server.header.vllm_version for server in servers}
    if len(releases) > 1:
        listed = ", ".join(sorted(str(release) for release in releases))
        warnings.append(Warn.SEVERAL_RELEASES(releases=listed))
    return servers, warnings


def _unreadable(name: str, error: RecordsError | OSError) -> RunWarning:
    return Warn.UNREADABLE(name, error=error, what="The instance")


def _each_life_once(
    servers: list[ServerFiles],
) -> tuple[list[ServerFiles], list[RunWarning]]:
    """Select the larger of the copies of one life, and name the others."""
    by_life: dict[str, ServerFiles] = {}
    copies = []
    for server in servers:
        life = server.header.life or server.name
        other = by_life.setdefault(life, server)
        if other is server:
            continue
        is_larger = _size(server) > _size(other)
        larger, copy = (server, other) if is_larger else (other, server)
        by_life[life] = larger
        copies.append(Warn.COPY(copy.name, of=larger.name, life=life))
    return [*by_life.values()], copies


def _size(server: ServerFiles) -> int:
    return sum(part.stat().st_size for part in parts_of(server.path))


def files_below(
    folder: Path, pattern: str, on_error: Callable[[OSError], None] | None = None
) -> list[Path]:
    """Find the files whose names match.

    `on_error` gets the error of each folder that cannot be read.
    """
    return sorted(
        Path(parent, name)
        for parent, folders, names in _walk(folder, on_error)
        for name in fnmatch.filter([*folders, *names], pattern)
    )


def _walk(
    folder: Path, on_error: Callable[[OSError], None] | None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder and those that it links to, each once."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        with suppress(OSError):
            stat = os.stat(parent)
            if (stat.st_dev, stat.st_ino) in seen:
                folders.clear()
                continue
            seen.add((stat.st_dev, stat.st_ino))
        # The folder itself before a link to it.
        folders.sort(key=lambda name: (os.path.islink(Path(parent, name)), name))
        yield parent, folders, names


def name_of(folder: Path, path: Path) -> str:
    """Name the instance of a file below `folder` by where the file lies."""
    inside = path.parent.relative_to(folder)
    name = str(inside) if inside.parts else folder.resolve().name
    return encodable(name)


def _server(name: str, path: Path) -> ServerFiles:
    oldest, *newer = parts_of(path)
    try:
        header = read_header(oldest, EngineHeader)
    except RecordsError:
        if not newer:
            raise
        oldest, header = newer[0], read_header(newer[0], EngineHeader)
    first = first_step(oldest)
    return ServerFiles(name, path, header, None if first is None else first.t_ns)


@dataclass(frozen=True)
class Clock:
    """`shift_ns` by instance, to be added to its moments; `zero_ns` is the first step.

    `unix_ns` is the wall clock at `zero_ns`, None where no file tells. `warnings` say
    how far the clocks can be trusted; there are none if they are one.
    """

    zero_ns: int
    shift_ns: dict[str, int]
    unix_ns: int | None
    warnings: tuple[RunWarning, ...] = ()

    def since_zero_ns(self, name: str, t_ns: int) -> int:
        """Shift a moment of the instance `name` to the common clock."""
        return t_ns + self.shift_ns.get(name, 0) - self.zero_ns

    @property
    def utc(self) -> str:
        """When the first step began, in words."""
        if self.unix_ns is None:
            return "at an unknown time"
        moment = datetime.fromtimestamp(self.unix_ns / 1e9, UTC)
        return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def common_clock(instances: Sequence[ServerFiles]) -> Clock:
    """Take the clock of the first instance for all; only those with steps count."""
    shown = [server for server in instances if server.first_ns is not None]
    if not shown:
        return Clock(0, {}, None)
    first = shown[0]
    ahead_ns = _ahead_ns(first)
    shifts: dict[str, int] = {}
    unknown, others = [], []
    for server in shown:
        shifts[server.name] = 0
        if server.header.boot_id == first.header.boot_id is not None:
            continue
        own_ns = _ahead_ns(server)
        if server is first:
            continue
        if own_ns is not None and ahead_ns is not None:
            shifts[server.name] = own_ns - ahead_ns
            others.append(server.name)
        else:
            unknown.append(server.name)
    zero_ns = min((server.first_ns or 0) + shifts[server.name] for server in shown)
    return Clock(
        zero_ns,
        shifts,
        None if ahead_ns is None else zero_ns + ahead_ns,
        _warnings(others, unknown),
    )


def _ahead_ns(instance: ServerFiles) -> int | None:
    """Compute how far the wall clock is ahead of the instance's own."""
    header = instance.header
    if header.began_ns is None or header.began_unix_ns is None:
        return None
    return header.began_unix_ns - header.began_ns


def _warnings(others: list[str], unknown: list[str]) -> tuple[RunWarning, ...]:
    warnings = []
    if others:
        warnings.append(Warn.OTHER_HOSTS(names=", ".join(others)))
    if unknown:
        warnings.append(Warn.UNKNOWN_CLOCK(names=", ".join(unknown)))
    return tuple(warnings)
