# SPDX-License-Identifier: Apache-2.0
"""Look at the records of three servers that kvtax ships: no vLLM is needed.

h100: Mooncake's connector as vLLM 0.18.1 has it, with a real model. hash_walk: with a
patch of kvtax that reads all cached block hashes in every step, as a fork that was
studied does; fixed: the same with the fixes; both of one sweep without a GPU.

--serve records a server instead, where vLLM for CPUs is installed: a null model, a
connector and some requests, in a minute.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtax.cli import Exit

# Beginning of the name of a folder in which a demo works.
ASIDE = ".kvtax-demo-"
NO_PAGE = "Its page, with all tables and each moment: kvtax demo --out DIR"
OWN_SERVER = (
    "Your own server: kvtax run --records DIR -- vllm serve ...; kvtax look DIR"
)
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
        help="keep the records and a page there (default: nothing is kept)",
    )
    parser.add_argument(
        "--serve", action="store_true", help="record a server on this machine"
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
    from kvtax.report.render import visible, wrapped

    out: Path | None = arguments.out and arguments.out.resolve()
    if out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DemoError(f"{out}: is there already; name a new folder with --out")
    # A server has its own temporary files, wherever its records go.
    temporary = Path("" if out and not arguments.serve else tempfile.gettempdir())
    parent = out.parent if out else temporary
    try:
        with _aside(parent) as aside:
            folder = aside / (out.name if out else "demo")
            _record(folder, temporary, arguments)
            actions.show(folder, folder / PAGE, None, Window(0, 0))
            if out:
                folder.replace(out)
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        raise DemoError(
            f"{parent}: {error.strerror}; name another folder with --out"
        ) from None
    page = (
        f"wrote {visible(str(out / PAGE))}: all tables, and each moment"
        if out
        else NO_PAGE
    )
    print(*wrapped([page, OWN_SERVER]), sep="\n")
    return Exit.GOOD


@contextmanager
def _aside(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent` for a while; remove those of demos that were killed."""
    for left in parent.glob(f"{ASIDE}*"):
        with suppress(OSError), _held(left):
            # An empty one may be just made.
            if any(left.iterdir()):
                shutil.rmtree(left)
    # Named before it is made, so that a signal finds it whenever it comes.
    aside = parent / f"{ASIDE}{secrets.token_hex(4)}"
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir(0o700)
        with _held(aside):
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder, however this process ends. Raises OSError if another holds it."""
    # Anybody may have made a pipe or a link of that name.
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def _record(folder: Path, temporary: Path, arguments: argparse.Namespace) -> None:
    """Put records into `folder`."""
    if not arguments.serve:
        from kvtax.look.demo import unpack

        unpack(folder)
        return
    from kvtax.engine.demo_server import record_server

    print("starting vLLM with a model that computes nothing ...", flush=True)
    with _aside(temporary) as scratch:
        name = record_server(folder, scratch, sys.executable)
    print(f"recorded: {name}\n")
