# SPDX-License-Identifier: Apache-2.0
"""The schema of a file is the tag of the struct that is its document or its header."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from lab.records import RecordsError

Kind = TypeVar("Kind", bound=msgspec.Struct)


class _Named(msgspec.Struct):
    schema: str | None = None


def schema_of(kind: type[msgspec.Struct]) -> str:
    """The schema that `kind` declares: kvtax.<name>/<version>."""
    return kind.__struct_config__.tag


def decode(path: Path, text: bytes, kind: type[Kind]) -> Kind:
    """`text` as a `kind`.

    Raises RecordsError naming both schemas if it is of another one, and
    msgspec.DecodeError if it is no JSON or a field is wrong.
    """
    found = msgspec.json.decode(text, type=_Named).schema
    if found != schema_of(kind):
        raise RecordsError(
            f"{path}: schema is {found!r}, this reader needs {schema_of(kind)!r}; "
            "use the kvtax version that wrote the run"
        )
    return msgspec.json.decode(text, type=kind)
