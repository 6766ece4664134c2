# SPDX-License-Identifier: Apache-2.0
"""Options that several subcommands have."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

if TYPE_CHECKING:
    from kvtax.hosts import Cluster


def whole_number(at_least: int, at_most: int = 2**63 - 1) -> Callable[[str], float]:
    """Return a parser of whole numbers within bounds."""
    import msgspec

    return parser_of(Annotated[int, msgspec.Meta(ge=at_least, le=at_most)])


def number(at_least: float, at_most: float | None = None) -> Callable[[str], float]:
    """Return a parser of finite numbers within bounds."""
    import msgspec

    return parser_of(Annotated[float, msgspec.Meta(ge=at_least, le=at_most)])


def parser_of(field_type: Any) -> Callable[[str], float]:
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


def optional_path(text: str) -> Path | None:
    """Parse a path; an empty text, as an unset input of a CI job, gives no path."""
    return Path(text) if text else None


def add_vllm(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, python: str, vllm: str
) -> None:
    """Add --python and --vllm, of which one is given; the texts are their help."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--python", metavar="PATH", default=sys.executable, help=python)
    group.add_argument("--vllm", metavar="VERSION", help=vllm)


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
    parser.add_argument("--limits", type=optional_path, metavar="FILE", help=text)
    parser.add_argument(
        "--junit", type=optional_path, metavar="FILE", help="write JUnit XML"
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
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="use a Ray cluster that asks for no token and that others can reach",
    )


def cluster_of(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster that add_ray's options name, None without --ray."""
    from kvtax.hosts import Cluster

    if arguments.ray is None:
        return None
    return Cluster(arguments.ray, arguments.insecure)
