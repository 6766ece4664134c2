# SPDX-License-Identifier: Apache-2.0
"""Look at the records of three servers that kvtax ships: no vLLM is needed.

hash_walk: a Mooncake connector that reads all cached block hashes in every step; fixed:
the same with the fixes; both of one sweep without a GPU. h100: Mooncake's connector on
an H100, with a real model.

--serve records a server instead, where vLLM for CPUs is installed: a null model, a
connector and some requests, in a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax demo`."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write records and page there (default: a new folder below TMPDIR)",
    )
    parser.add_argument(
        "--serve", action="store_true", help="record a server on this machine"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="with --serve: the Python that has vLLM for CPUs (default: this one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Unpack or make records, and look at them. Raises ServerError and OSError."""
    from kvtax.cli import Exit
    from kvtax.cli.look import PAGE
    from kvtax.look import actions
    from kvtax.look.demo import unpack
    from kvtax.look.perfetto import Window

    folder = arguments.out or Path(tempfile.mkdtemp(prefix="kvtax-demo-"))
    if arguments.serve:
        from kvtax.engine.demo_server import record_server

        print("starting vLLM with a model that computes nothing ...", flush=True)
        print(f"recorded: {record_server(folder, arguments.python)}\n")
    else:
        unpack(folder)
    actions.show(folder, folder / PAGE, None, Window(0, 0))
    print(
        "\nYour own server: kvtax run --records DIR -- vllm serve ...; kvtax look DIR"
    )
    return Exit.GOOD
