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
import errno
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from kvtax.cli import Exit

# Errors of a folder that is not there, cannot be written, or is full.
NOT_WRITTEN = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
}


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


class DemoError(Exception):
    """The demo cannot write where it is sent."""

    exit_code = Exit.BAD_INPUT


def run(arguments: argparse.Namespace) -> int:
    """Unpack or make records, and look at them; without an answer leave nothing.

    Raises DemoError, ServerError and OSError.
    """
    from kvtax.cli.look import PAGE
    from kvtax.look import actions
    from kvtax.look.perfetto import Window

    out: Path | None = arguments.out and arguments.out.resolve()
    if out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DemoError(f"{out}: is there already; name a new folder with --out")
    parent = out.parent if out else Path(tempfile.gettempdir())
    # Named before it is made, so that a signal finds it whenever it comes.
    aside = parent / f".kvtax-demo-{secrets.token_hex(4)}"
    try:
        aside.mkdir(parents=True)
        out = out or parent / aside.name.removeprefix(".")
        folder = aside / out.name
        _record(folder, arguments)
        actions.show(folder, folder / PAGE, None, Window(0, 0))
        folder.replace(out)
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        raise DemoError(
            f"{parent}: {error.strerror}; name another folder with --out"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"wrote {out / PAGE}: all tables, and each moment")
    print("Your own server: kvtax run --records DIR -- vllm serve ...; kvtax look DIR")
    return Exit.GOOD


def _record(folder: Path, arguments: argparse.Namespace) -> None:
    """Put records into `folder`."""
    if not arguments.serve:
        from kvtax.look.demo import unpack

        unpack(folder)
        return
    from kvtax.engine.demo_server import record_server

    print("starting vLLM with a model that computes nothing ...", flush=True)
    print(f"recorded: {record_server(folder, arguments.python)}\n")
