# SPDX-License-Identifier: Apache-2.0
"""Read the TOML files under configs/ into structs."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

Kind = TypeVar("Kind")


class ConfigError(Exception):
    """A config file is missing or wrong; the message names file and field."""

    exit_code = 2


def read_toml(path: Path, kind: type[Kind]) -> Kind:
    """Read the file as a `kind`. Raises ConfigError, which lists the known names."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.toml")))
        raise ConfigError(
            f"no {path.parent.name} config named {path.stem!r}; there are: {known}"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
