# SPDX-License-Identifier: Apache-2.0
"""List or fetch the results that hosts have put into a store, during a run or later.

docs/hosts.md has the stores: a folder that all hosts share, or s3://BUCKET.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `kvtax store`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the pieces below URL")
    listing.add_argument("url", metavar="URL")
    fetching = actions.add_parser("fetch", help="fetch their files into FOLDER")
    fetching.add_argument("url", metavar="URL")
    fetching.add_argument("folder", type=Path, metavar="FOLDER")
    listing.set_defaults(folder=None)


def run(arguments: argparse.Namespace) -> int:
    """List the pieces, or fetch all whose folders are missing."""
    from kvtax.hosts.store import Store

    store = Store(arguments.url)
    store.require()
    pieces = store.pieces()
    if arguments.folder is None:
        for name, piece in pieces.items():
            print(f"{piece.put_at}  {piece.bytes:>13,}  {piece.host:<15}  {name}")
        print(f"{len(pieces)} pieces")
        return 0
    for name, piece in pieces.items():
        into = arguments.folder / name
        if not into.exists():
            into.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(name, piece, into)
            print(into, flush=True)
    return 0
