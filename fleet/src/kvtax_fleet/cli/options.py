# SPDX-License-Identifier: Apache-2.0
"""Options that are fields of a struct, and those of policies and models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from kvtax.cli.options import parser_of

if TYPE_CHECKING:
    import msgspec

    Struct = TypeVar("Struct", bound=msgspec.Struct)


class OptionsError(Exception):
    """Options are missing or exclude each other; the message says which."""

    exit_code = 2


def add_settings(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Add --settings, and in its place the options of `add_fields`."""
    parser.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="JSON file of all settings, in place of the options for them",
    )
    add_fields(parser, kind, required=False)


def add_fields(
    parser: argparse.ArgumentParser, kind: type[msgspec.Struct], required: bool = True
) -> None:
    """Add an option for each field of `kind` that has a description."""
    for field, field_type, text in _described(kind):
        value_type = get_args(field_type)[0]
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if value_type is bool:
            options |= {"action": "store_true"}
        else:
            default = None if field.required else field.default
            if default is not None:
                options["help"] += f" (default: {str(default).removesuffix('.0')})"
            options["required"] = required and field.required
            options["type"] = str if value_type is str else parser_of(field_type)
            options["metavar"] = None if value_type is str else "N"
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def fields_of(
    arguments: argparse.Namespace, kind: type[Struct], **others: Any
) -> Struct:
    """Make the struct of the given options and its `others`, or read --settings.

    Raises OptionsError and OSError.
    """
    import msgspec

    described = {field.name: (field, text) for field, _, text in _described(kind)}
    given = {
        name: value for name, value in vars(arguments).items() if name in described
    }
    given |= others
    path = getattr(arguments, "settings", None)
    if path is None:
        for name, (field, text) in described.items():
            if field.required and name not in given:
                raise OptionsError(f"--{name.replace('_', '-')} is needed: {text}")
        return kind(**given)
    if given:
        option = next(iter(given)).replace("_", "-")
        raise OptionsError(f"--settings {path} has all settings: leave --{option} out")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"--settings {path}: {error}") from None


def _described(
    kind: type[msgspec.Struct],
) -> Iterator[tuple[msgspec.structs.FieldInfo, Any, str]]:
    """Yield the fields with a description, their types without None, the texts."""
    import msgspec

    for field in msgspec.structs.fields(kind):
        is_annotated = get_origin(field.type) is Annotated
        types = [field.type] if is_annotated else get_args(field.type)
        for field_type in types:
            if get_origin(field_type) is not Annotated:
                continue
            if text := get_args(field_type)[1].description:
                yield field, field_type, text


def add_parameters(parser: argparse.ArgumentParser) -> None:
    """Add --parameters of a routing policy."""
    parser.add_argument(
        "--parameters",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="parameters of the policy",
    )
