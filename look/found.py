# SPDX-License-Identifier: Apache-2.0
"""The instances whose records lie in a folder, before their steps are read.

Records of many servers may be more than the memory holds. So instances are found first,
and their steps read one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lab.records import RecordsError
from lab.records.lines import read_header
from lab.records.step_table import older_part
from lab.records.steps import EngineHeader, first_step
from lab.records.warning import RunWarning


@dataclass(frozen=True)
class Found:
    """One engine lifetime: its engine_step.jsonl, and when its first step began."""

    name: str
    path: Path
    header: EngineHeader
    first_ns: int | None


def find(folder: Path) -> tuple[list[Found], list[RunWarning]]:
    """All instances below `folder`, and what is wrong with those that cannot be read.

    Raises RecordsError if there are no step records at all.
    """
    if not folder.is_dir():
        raise RecordsError(f"{folder}: no such directory")
    paths = sorted(folder.rglob("engine_step*.jsonl"))
    if not paths:
        raise RecordsError(
            f"{folder}: no engine_step.jsonl here or below; was the server started "
            "with KVTAX_STEP_RECORDS_DIR, and is its vLLM patched "
            "(python apply_step_timing_v2.py --status)?"
        )
    found, warnings = [], []
    for path in paths:
        inside = path.parent.relative_to(folder)
        name = str(inside) if inside.parts else folder.resolve().name
        if path.name != "engine_step.jsonl":
            name += f"/{path.stem}"
        try:
            found.append(_found(name, path))
        except RecordsError as error:
            warnings.append(unreadable(name, error))
    releases = {one.header.vllm_version for one in found}
    if len(releases) > 1:
        told = ", ".join(sorted(str(release) for release in releases))
        warnings.append(
            RunWarning(
                "several_releases",
                f"the instances run different vLLM releases: {told}",
                "Compare instances of one release",
            )
        )
    return found, warnings


def unreadable(name: str, error: RecordsError) -> RunWarning:
    """What is told of an instance whose files are not what they should be."""
    remedy = "The instance is left out; see the file"
    return RunWarning("unreadable", f"{name}: {error}", remedy)


def _found(name: str, path: Path) -> Found:
    header = read_header(path, EngineHeader)
    oldest = older_part(path) if older_part(path).is_file() else path
    first = first_step(oldest)
    return Found(name, path, header, None if first is None else first.t_ns)
