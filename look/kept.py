# SPDX-License-Identifier: Apache-2.0
"""Steps of a server that has ended, kept as Parquet beside its records.

Reading JSON is what takes a look its time. So what was read once is kept, with the
sizes and times of the files that it was read from, and is read again only if these
change. The file may be deleted at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import polars as pl

from lab.records.warning import RunWarning

# What the table of steps looks like; counted up when that changes.
VERSION = 1
FEWEST_STEPS = 100_000
# A server that still writes changes its files four times a second.
QUIET_S = 10.0
PATTERNS = ("engine_step*.jsonl*", "worker_step.r*.jsonl*")

Read = tuple[pl.DataFrame, list[RunWarning]]


def kept(engine: Path, read: Callable[[], Read]) -> Read:
    """The steps of an `engine` file and its workers', and what is wrong with them, as
    `read` gives them."""
    folder, path = engine.parent, engine.with_suffix(".parquet")
    key = _key(folder)
    with suppress(OSError, ValueError, KeyError, pl.exceptions.PolarsError):
        told = pl.read_parquet_metadata(path)
        if told["kvtax_key"] == key:
            warnings = msgspec.json.decode(
                told["kvtax_warnings"], type=list[RunWarning]
            )
            return pl.read_parquet(path), warnings
    steps, warnings = read()
    # Not if the files have changed meanwhile, or may change any moment.
    if steps.height >= FEWEST_STEPS and _quiet(folder) and _key(folder) == key:
        _keep(path, key, steps, warnings)
    return steps, warnings


def _keep(path: Path, key: str, steps: pl.DataFrame, warnings: list) -> None:
    """Write the file, whole or not at all; nothing where that cannot be."""
    partial = path.with_name(f"{path.name}.partial")
    told = {"kvtax_key": key, "kvtax_warnings": msgspec.json.encode(warnings).decode()}
    try:
        steps.write_parquet(partial, compression="lz4", metadata=told)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern))


def _key(folder: Path) -> str:
    facts = [
        (path.name, (told := path.stat()).st_size, told.st_mtime_ns)
        for path in _files(folder)
    ]
    return msgspec.json.encode([VERSION, *facts]).decode()


def _quiet(folder: Path) -> bool:
    newest_s = max(path.stat().st_mtime for path in _files(folder))
    return time.time() - newest_s > QUIET_S
