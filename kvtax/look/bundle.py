# SPDX-License-Identifier: Apache-2.0
"""Records to attach to an issue: times and counts, and nothing that names anybody.

Of each line, the fields that are numbers, or numbers by method, are kept; of a header,
versions and what was recorded. Prompts are in no record. Request ids, hashes of them,
paths, hosts and process ids are left out.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from kvtax.look.discover import ServerFiles
from kvtax.records import RecordsError
from kvtax.records.files import written_whole
from kvtax.records.parts import lines_of, opened, parts_of
from kvtax.records.steps import FIELDS

# Fields of headers that say what was recorded, and with what.
OF_HEADERS = {
    *("schema", "clock", "units", "vllm_version", "dp_rank", "rank", "stage"),
    *("every", "cpu_every", "connectors", "methods", "not_timed", "began_ns"),
}
OF_REQUESTS = {
    *("arrival_ns", "finished_ns", "prompt_tokens", "cached_tokens"),
    *("external_tokens", "output_tokens", "preemptions", "before_engine_us"),
    *("kv_wait_ns", "preempted_steps", "first_step", "first_token_step"),
    *("last_step", "finish_reason"),
}
OF_LINES = {field.name for field in FIELDS} | OF_REQUESTS
FILES = ("engine_step.jsonl", "worker_step.r*.jsonl", "engine_request.jsonl")


def write_bundle(servers: Sequence[ServerFiles], out: Path) -> int:
    """Write the records of servers into a tar.gz; return the number of lines.

    Raises RecordsError and OSError.
    """
    count = 0
    with written_whole(out) as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for number, server in enumerate(servers):
            folder = server.path.parent
            for path in sorted(p for kind in FILES for p in folder.glob(kind)):
                text = io.BytesIO()
                for part in parts_of(path):
                    count += _copy(part, f"server{number}", text)
                entry = tarfile.TarInfo(f"server{number}/{path.name}")
                entry.size = text.tell()
                text.seek(0)
                tar.addfile(entry, text)
    return count


def _copy(part: Path, life: str, out: IO[bytes]) -> int:
    """Copy the lines of a part that are records, with the fields that name nobody."""
    count = 0
    try:
        with opened(part) as file:
            for record in _records(file):
                is_header = "schema" in record
                if is_header and out.tell():
                    continue
                kept = _header(record, life) if is_header else _line(record)
                if "id" in record:
                    kept["id"] = str(count)
                out.write(json.dumps(kept, separators=(",", ":")).encode() + b"\n")
                count += not is_header
    except OSError as error:
        raise RecordsError(f"{part}: {error.strerror}") from None
    return count


def _records(file: IO[bytes]) -> Iterator[dict[str, object]]:
    for line in lines_of(file):  # type: ignore[arg-type]
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _header(record: dict[str, object], life: str) -> dict[str, object]:
    kept = {key: value for key, value in record.items() if key in OF_HEADERS}
    label = record.get("label")
    patches = label.get("patches") if isinstance(label, dict) else None
    if isinstance(patches, dict):
        kept["label"] = {"patches": dict.fromkeys(patches, "")}
    return kept | {"life": life}


def _line(record: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in record.items() if key in OF_LINES}
