# SPDX-License-Identifier: Apache-2.0
"""Read the TOML files under configs/ into structs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

# Levels of tables and lists in a file of settings.
MOST_LEVELS = 100
Kind = TypeVar("Kind")


class ConfigError(Exception):
    """A config file is missing or wrong; the message names file and field."""

    exit_code = 2


def read_toml(path: Path, kind: type[Kind]) -> Kind:
    """Read the file as a `kind`. Raises ConfigError, which lists the known names."""
    try:
        return decode_toml(path, path.read_bytes(), kind)
    except FileNotFoundError:
        if path.parent.parent.name != "configs":
            raise ConfigError(f"{path}: no such file") from None
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.toml")))
        raise ConfigError(
            f"no {path.parent.name} config named {path.stem!r}; there are: {known}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def decode_toml(path: Path, content: bytes, kind: type[Kind]) -> Kind:
    """Decode the content of a file as a `kind`. Raises ConfigError."""
    try:
        document = msgspec.toml.decode(content)
        require_shallow(document, str(path))
        for name, value in _numbers(document, "$"):
            # Numbers of 64 bits are all that TOML and JSON have in common.
            if not math.isfinite(value) or not -(2**63) <= value < 2**63:
                raise ConfigError(f"{path}: {value} is out of range - at `{name}`")
        return msgspec.toml.decode(content, type=kind)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no TOML, a wrong field
        raise ConfigError(f"{path}: {error}") from None


def require_shallow(value: Any, source: str) -> None:
    """Raise ConfigError for tables and lists that nothing could walk down."""
    inside = [value]
    for _ in range(MOST_LEVELS):
        inside = [
            part
            for outer in inside
            if isinstance(outer, dict | list)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if inside:
        raise ConfigError(f"{source}: is nested too deeply: over {MOST_LEVELS} levels")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a document, with their names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, f"{name}[...]")
    elif isinstance(value, int | float):
        yield name, value
