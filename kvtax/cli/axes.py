# SPDX-License-Identifier: Apache-2.0
"""Measure each connector on each release of vLLM, along each axis.

configs/observatory.toml lists the connectors. Each is measured in turn with a no-op
connector, so that its figures can be compared with those of another minute or machine.
Kept cells are not measured again, so a run that was stopped goes on where it was.
Writes the cells and README.md into the folder of --out.

A vLLM that has no build for CPUs (--vllm PATH: a git checkout, or a source release,
unpacked) runs on the compiled parts of the newest release that has a build.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtax.cli.options import add_ray, cluster_of

OF_SOURCES = Path("runs/axes")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax axes`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--release", action="append", metavar="VERSION", help="only this (repeatable)"
    )
    which.add_argument(
        "--vllm", type=Path, metavar="PATH", help="the vLLM whose Python files are here"
    )
    parser.add_argument(
        "--connector", action="append", metavar="CONFIG", help="only this (repeatable)"
    )
    parser.add_argument(
        "--again", action="store_true", help="also measure cells that are kept"
    )
    add_ray(parser, "measure on all hosts")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for cells and page (default: studies/observatory, with --vllm "
        f"{OF_SOURCES})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the cells that are missing, and write the page.

    Raises ConfigError for --ray with --vllm.
    """
    from kvtax.axes.matrix import (
        RESULTS,
        Choice,
        measure_matrix,
        read_all_cells,
        read_matrix,
    )
    from kvtax.axes.page import write_page
    from kvtax.cli import require_checkout
    from kvtax.config import ConfigError

    require_checkout("axes")
    vllm, ray = arguments.vllm, cluster_of(arguments)
    if vllm and ray:
        raise ConfigError("--vllm PATH is measured here only, without --ray")
    folder = arguments.out or (OF_SOURCES if vllm else RESULTS)
    matrix = read_matrix()
    choice = Choice(
        arguments.release,
        arguments.connector,
        arguments.again,
        vllm,
        folder,
    )
    measure_matrix(matrix, choice, ray)
    page = write_page(matrix, read_all_cells(folder), folder)
    print(f"kvtax axes: wrote {page}")
    return 0
