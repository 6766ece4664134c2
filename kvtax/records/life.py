# SPDX-License-Identifier: Apache-2.0
"""Folders of engine lives: each start of an engine core writes to one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtax.records import RecordsError
from kvtax.records.parts import whole

STEPS = "engine_step.jsonl"


def lives(folder: Path) -> list[Path]:
    """Find the folders of engine lives in and below `folder`, oldest first.

    A life whose writer was killed while it began a new file has the older part alone.
    """
    found = {path.parent for path in folder.rglob(f"{STEPS}*") if _is_records(path)}
    return sorted(found)


def only_life(folder: Path) -> Path:
    """Return the folder of the one engine life whose records are in `folder`.

    Returns `folder` itself where there are none, so that a missing file has a name.
    Raises RecordsError if there are several.
    """
    found = list(_here(folder))
    if len(found) > 1:
        names = ", ".join(life.name for life in found)
        raise RecordsError(
            f"{folder}: records of {len(found)} engine lives ({names}), of which only "
            "one was expected: a server of one engine that starts once"
        )
    return found[0] if found else folder


def _here(folder: Path) -> Iterator[Path]:
    if any(map(_is_records, folder.glob(f"{STEPS}*"))):
        yield folder
    for inner in sorted(path for path in folder.glob("*") if path.is_dir()):
        if any(map(_is_records, inner.glob(f"{STEPS}*"))):
            yield inner


def _is_records(path: Path) -> bool:
    return whole(path).name == STEPS
