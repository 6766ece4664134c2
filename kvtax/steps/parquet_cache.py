# SPDX-License-Identifier: Apache-2.0
"""Steps kept as Parquet beside their records, as reading JSON takes most of the time.

The file has the sizes and times of the files that it was made of, and is made again if
these change. It may be deleted at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import polars as pl

from kvtax.records.warning import RunWarning

# What the table of steps looks like; counted up when that changes.
VERSION = 6
FEWEST_STEPS = 100_000
# A server that still writes changes its files four times a second.
QUIET_S = 10.0
PATTERNS = ("engine_step*.jsonl*", "worker_step.r*.jsonl*")


class RecordedSteps(msgspec.Struct, frozen=True):
    """The steps of one engine life as recorded (kvtax.steps.life)."""

    table: pl.DataFrame
    worker_records: int
    torn_lines: int
    warnings: list[RunWarning]


def cached(
    engine: Path, read: Callable[[], RecordedSteps], ended: bool
) -> RecordedSteps:
    """Read the steps of an `engine` file and its workers, as `read` gives them.

    They are kept if the server has `ended`, or if they are many and it seems so.
    """
    folder, path = engine.parent, engine.with_suffix(".parquet")
    key = _key(folder)
    # polars refuses a path that is no UTF-8 with a TypeError.
    with suppress(OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError):
        metadata = pl.read_parquet_metadata(path)
        if metadata["kvtax_key"] == key:
            facts = msgspec.json.decode(metadata["kvtax_facts"], type=_Facts)
            return RecordedSteps(pl.read_parquet(path), *msgspec.structs.astuple(facts))
    steps = read()
    # Not if the files have changed meanwhile, or may change any moment.
    seems_ended = steps.table.height >= FEWEST_STEPS and _quiet(folder)
    if (ended or seems_ended) and _key(folder) == key:
        _write(path, key, steps)
    return steps


class _Facts(msgspec.Struct):
    worker_records: int
    torn_lines: int
    warnings: list[RunWarning]


def _write(path: Path, key: str, steps: RecordedSteps) -> None:
    """Write the file, whole or not at all; nothing where that cannot be."""
    partial = path.with_name(f"{path.name}.partial")
    facts = _Facts(steps.worker_records, steps.torn_lines, steps.warnings)
    metadata = {"kvtax_key": key, "kvtax_facts": msgspec.json.encode(facts).decode()}
    try:
        # Read whole, so statistics of its parts would serve nobody.
        steps.table.write_parquet(
            partial, compression="lz4", statistics=False, metadata=metadata
        )
        partial.replace(path)
    except (OSError, TypeError):
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()
    )


def _key(folder: Path) -> str:
    facts = [
        (path.name, (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in _files(folder)
    ]
    return msgspec.json.encode([VERSION, *facts]).decode()


def _quiet(folder: Path) -> bool:
    newest_s = [path.stat().st_mtime for path in _files(folder)]
    return time.time() - max(newest_s, default=0) > QUIET_S
