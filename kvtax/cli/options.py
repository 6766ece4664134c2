# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands have, and options that are fields of a struct."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

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
            options["type"] = str if value_type is str else _parser_of(field_type)
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
    except ValueError as error:
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
            if get_origin(field_type) is Annotated:
                yield field, field_type, get_args(field_type)[1].description


def whole_number(at_least: int, at_most: int = 2**63 - 1) -> Callable[[str], float]:
    """Return a parser of whole numbers within bounds."""
    import msgspec

    return _parser_of(Annotated[int, msgspec.Meta(ge=at_least, le=at_most)])


def number(at_least: float, at_most: float | None = None) -> Callable[[str], float]:
    """Return a parser of finite numbers within bounds."""
    import msgspec

    return _parser_of(Annotated[float, msgspec.Meta(ge=at_least, le=at_most)])


def _parser_of(field_type: Any) -> Callable[[str], float]:
    """Return a parser of numbers within the bounds of the type."""
    import msgspec

    value_type = get_args(field_type)[0]

    def parse(text: str) -> float:
        try:
            number: float = msgspec.convert(value_type(text), field_type)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from None
        if not math.isfinite(number):
            raise argparse.ArgumentTypeError(f"{text} is not finite")
        return number

    parse.__name__ = value_type.__name__
    return parse


def add_vllm(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, python: str, vllm: str
) -> None:
    """Add --python and --vllm, of which one is given; the texts are their help."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--python", metavar="PATH", default=sys.executable, help=python)
    group.add_argument("--vllm", metavar="VERSION", help=vllm)


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Add --wait for the end of another measurement on this machine."""
    parser.add_argument(
        "--wait",
        dest="wait_s",
        type=number(0),
        default=0.0,
        metavar="SECONDS",
        help="wait for another measurement on this machine to end (default: refuse)",
    )


def add_connector_config(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
) -> None:
    """Add --connector-config of a connector that has no file in configs/."""
    parser.add_argument(
        "--connector-config",
        metavar="JSON|@FILE",
        help="added to its kv_transfer_config",
    )


def add_limits(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --limits, and --junit for the outcome of the checks."""
    parser.add_argument("--limits", type=Path, metavar="FILE", help=text)
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML")


def add_parameters(parser: argparse.ArgumentParser) -> None:
    """Add --parameters of a routing policy."""
    parser.add_argument(
        "--parameters",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="parameters of the policy",
    )


def add_ray(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, text: str
) -> None:
    """Add --ray; `text` says what the hosts are for."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{text} of this Ray cluster, or auto: the cluster of this host "
        "(docs/operate.md)",
    )


def add_model(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --model of the estimates that need a model's shape."""
    parser.add_argument(
        "--model",
        default="qwen3-coder-30b-a3b",
        help=f"{text}a name in configs/models, or a config.json (default: %(default)s)",
    )
