# SPDX-License-Identifier: Apache-2.0
"""Files that are one JSON object: read and checked, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.records import RecordsError
from lab.records.schema import Kind, decode


def read_document(path: Path, kind: type[Kind]) -> Kind:
    """The `kind` in `path`; RecordsError if missing, bad or of another schema."""
    try:
        return decode(path, path.read_bytes(), kind)
    except FileNotFoundError:
        raise RecordsError(f"{path}: missing") from None
    except OSError as error:
        raise RecordsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: {error}") from None


def write_document(path: Path, document: msgspec.Struct | dict) -> None:
    """Write `document` as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write `path`, so that a killed writer leaves the old file, or none."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
