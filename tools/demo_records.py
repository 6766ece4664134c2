# SPDX-License-Identifier: Apache-2.0
"""Make the records that `kvtax demo` shows, from lives of engines.

    python -m tools.demo_records NAME=LIFE[:FIRST:STEPS] ...

LIFE is the folder of an engine's life, as a sweep's `CONFIG/r0/` has. Steps FIRST to
FIRST + STEPS are kept, with the requests that lie within. CPU clocks are left out. The
name of the connector is that of the config where the recorder did not note it. All
lives are moved to one beginning and one host, so that the page shows them together.
The result replaces kvtax/look/demo.tar.xz.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtax.look.demo import RECORDS
from kvtax.paths import REPOSITORY

LEFT_OUT = {"schedule_cpu_us", "update_cpu_us", "thread_cpu_us", "began_unix_ns"}
BEGIN_NS = 10**12
PLACE = {"host": "demo", "boot_id": "demo"}


def main() -> None:
    """Write the archive, and print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lives", nargs="+", metavar="NAME=LIFE[:FIRST:STEPS]")
    lives = parser.parse_args().lives
    with tarfile.open(RECORDS, "w:xz", preset=9) as archive:
        for argument in lives:
            name, _, place = argument.partition("=")
            life, *window = place.split(":")
            first, steps = map(int, window) if window else (0, 10**9)
            for file, text in _cut(Path(life), first, first + steps):
                entry = tarfile.TarInfo(f"{name}/{file}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    print(f"{RECORDS}: {RECORDS.stat().st_size:,} bytes")


def _cut(life: Path, first: int, end: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file, with the steps from `first` up to `end`."""
    moved_ns = BEGIN_NS - _begin_ns(life / "engine_step.jsonl", first)
    for path in sorted(life.glob("*.jsonl")):
        if path.name == "threads.jsonl":
            continue
        header, *records = map(json.loads, path.read_text().splitlines())
        kept = [record for record in records if _within(record, first, end)]
        named = {"connectors": [_connector(header["label"]["config"])]}
        slim = [_moved(line, moved_ns) for line in (named | header | PLACE, *kept)]
        lines = [json.dumps(line, separators=(",", ":")) for line in slim]
        yield path.name, "\n".join([*lines, ""]).encode()


def _connector(config: str) -> str:
    """Name the class of the connector of a config."""
    text = (REPOSITORY / "configs" / "connectors" / f"{config}.toml").read_text()
    return str(tomllib.loads(text)["kv_transfer_config"]["kv_connector"])


def _begin_ns(steps: Path, first: int) -> int:
    records = map(json.loads, steps.read_text().splitlines()[1:])
    return int(next(step["t_ns"] for step in records if step["step_id"] >= first))


def _within(record: dict[str, Any], first: int, end: int) -> bool:
    if "step_id" in record:
        return bool(first <= record["step_id"] < end)
    return bool(first <= record["first_step"] and record["last_step"] < end)


def _moved(record: dict[str, Any], ns: int) -> dict[str, Any]:
    """Return a record without LEFT_OUT, with all moments `ns` later."""
    kept = {key: value for key, value in record.items() if key not in LEFT_OUT}
    return {
        key: _later(value, ns) if key.endswith("_ns") else value
        for key, value in kept.items()
    }


def _later(moment: Any, ns: int) -> Any:
    if isinstance(moment, list):
        return [_later(each, ns) for each in moment]
    return None if moment is None else moment + ns


if __name__ == "__main__":
    main()
