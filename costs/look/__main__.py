# SPDX-License-Identifier: Apache-2.0
"""How long `python -m look` takes for the records of many servers, and how much memory.

Makes up records in a temporary folder, which is deleted at the end: at 100 million
steps of 64 servers 1.3 GB, and 7 GB more of what a first look keeps. Looks at them
twice, each time in a process of its own, whose times and peak resident memory come from
the kernel. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from costs.look.made_up_servers import write_servers
from costs.look.processes import taken_by
from lab.serving.supervise import exit_on_signals


def look(name: str, folder: Path) -> str:
    """Look at `folder`; its row of the table."""
    page = str(folder / "report.html")
    taken = taken_by("look", str(folder / "records"), "--out", page)
    return f"| {name} | {taken.cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.look",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100_000_000, help="in all")
    parser.add_argument("--servers", type=int, default=64)
    chosen = parser.parse_args()
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="costs_look.") as made:
        folder = Path(made)
        write_servers(folder / "records", chosen.steps, chosen.servers)
        print(f"{chosen.steps:,} steps of {chosen.servers} servers\n")
        print("| look | s | CPU s | peak MiB |\n|---|---:|---:|---:|", flush=True)
        print(look("first, of JSON", folder), flush=True)
        print(look("second, of what the first kept", folder))
        print(f"\nThe page has {(folder / 'report.html').stat().st_size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
