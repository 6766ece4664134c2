# SPDX-License-Identifier: Apache-2.0
"""Read and write instances.json (lab/records/instances.py)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.records.documents import write_document
from lab.records.instances import Instance, InstancesFile


class InstancesError(Exception):
    """An instances file is missing or wrong; the message names file and field."""


def read_instances(path: Path) -> list[Instance]:
    """Raises InstancesError. A file that somebody wrote by hand needs no schema."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=InstancesFile).instances
    except OSError as error:
        raise InstancesError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise InstancesError(f"{path}: {error}") from None


def write_instances(path: Path, instances: list[Instance]) -> None:
    """Write the file whole or not at all."""
    write_document(path, InstancesFile(instances))
