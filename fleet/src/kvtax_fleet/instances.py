# SPDX-License-Identifier: Apache-2.0
"""Instances files: the launcher's instances.json, or TOML or JSON written by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from kvtax.records.files import write_document

from kvtax_fleet.records.instances import Instance, InstancesFile

_EXPECTED = 'instances = ["http://HOST:PORT", ...] expected'


class InstancesError(Exception):
    """An instances file is missing or wrong; the message names file and field."""

    exit_code = 2


def read_instances(path: Path) -> list[Instance]:
    """Read the instances in `path`, by its suffix TOML or JSON. Raises InstancesError.

    A file written by hand needs no `schema`. It is a list of instances, or has one as
    `instances`; each is a URL or a table of fields, whose `name` is by default the
    URL's host and port.
    """
    try:
        if path.suffix == ".toml":
            content: Any = tomllib.loads(path.read_bytes().decode())
        else:
            content = msgspec.json.decode(path.read_bytes())
        return _instances_of(content)
    except OSError as error:
        raise InstancesError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InstancesError(f"{path}: {error}") from None


def instances_of_urls(texts: Sequence[str]) -> list[Instance]:
    """Parse `[NAME=]URL` texts of a command line. Raises InstancesError."""
    tables = []
    for text in texts:
        name, equals, url = text.partition("=")
        is_named = equals and "://" not in name
        tables.append({"name": name, "url": url} if is_named else {"url": text})
    try:
        return _instances_of(tables)
    except ValueError as error:
        raise InstancesError(
            f"--url: {error}; [NAME=]http://HOST:PORT expected"
        ) from None


def write_instances(path: Path, instances: list[Instance]) -> None:
    """Write the file whole or not at all."""
    write_document(path, InstancesFile(instances))


def _instances_of(content: Any) -> list[Instance]:
    """Check the content of a file. Raises ValueError."""
    document = {"instances": content} if isinstance(content, list) else content
    if not isinstance(document, dict) or not isinstance(
        document.get("instances"), list
    ):
        raise ValueError(_EXPECTED)
    tables = [_table_of(instance) for instance in document["instances"]]
    return msgspec.convert({**document, "instances": tables}, InstancesFile).instances


def _table_of(instance: Any) -> Any:
    table = {"url": instance} if isinstance(instance, str) else instance
    if not isinstance(table, dict) or not isinstance(table.get("url"), str):
        return table
    url = table["url"].rstrip("/")
    return {"name": url.partition("//")[2].partition("/")[0], **table, "url": url}
