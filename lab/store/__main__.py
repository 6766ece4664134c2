# SPDX-License-Identifier: Apache-2.0
"""What a store holds, while a run goes on or later.

python -m lab.store list URL              the pieces below URL
python -m lab.store fetch URL FOLDER      their files, a folder for each piece
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lab.store.errors import StoreError
from lab.store.store import Store


def main() -> int:
    """Exit status 0, or 1 with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("list", "fetch"):
        command = commands.add_parser(name)
        command.add_argument("url", metavar="URL")
        if name == "fetch":
            command.add_argument("folder", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    try:
        store = Store(chosen.url)
        if chosen.command == "list":
            print_pieces(store)
        else:
            fetch_all(store, chosen.folder)
    except (StoreError, OSError) as error:
        print(f"lab.store: {error}", file=sys.stderr)
        return 1
    return 0


def print_pieces(store: Store) -> None:
    pieces = store.pieces()
    for name, piece in pieces.items():
        print(f"{piece.put_at}  {piece.bytes:>13,}  {piece.host:<15}  {name}")
    print(f"{len(pieces)} pieces")


def fetch_all(store: Store, folder: Path) -> None:
    """A piece whose folder is there already is left out."""
    for name, piece in store.pieces().items():
        into = folder / name
        if not into.exists():
            into.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(name, piece, into)
            print(into, flush=True)


if __name__ == "__main__":
    sys.exit(main())
