# SPDX-License-Identifier: Apache-2.0
"""Measure each connector on each release of vLLM, along each axis.

configs/observatory.toml lists the connectors. Kept cells are not measured again, so a
run that was stopped goes on where it was. Writes studies/observatory/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtax.cli.options import add_ray


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax axes`."""
    parser.add_argument(
        "--release", action="append", metavar="VERSION", help="only this (repeatable)"
    )
    parser.add_argument(
        "--connector", action="append", metavar="CONFIG", help="only this (repeatable)"
    )
    parser.add_argument(
        "--again", action="store_true", help="also measure cells that are kept"
    )
    add_ray(parser, "measure on all hosts")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing, write the page"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the page for a browser"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the cells that are missing, and write the page."""
    from kvtax.axes.matrix import Choice, measure_matrix, read_all_cells, read_matrix
    from kvtax.axes.page import write_pages
    from kvtax.cli import require_checkout

    require_checkout("axes")
    matrix = read_matrix()
    if not arguments.page:
        choice = Choice(arguments.release, arguments.connector, arguments.again)
        measure_matrix(matrix, choice, arguments.ray)
    for file in write_pages(matrix, read_all_cells(), arguments.html):
        print(f"kvtax axes: wrote {file}")
    return 0
