# SPDX-License-Identifier: Apache-2.0
"""How long `python -m look` takes for the records of many servers, and how much memory.

Makes up records in a temporary folder, which is deleted at the end: at 100 million
steps of 64 servers 1.3 GB, and 7 GB more of what a first look keeps. Looks at them
twice, each time in a process of its own, whose times and peak resident memory come from
the kernel. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from costs.look.made_up_servers import write_servers
from lab.serving.supervise import exit_on_signals


def look(name: str, folder: Path) -> str:
    """Look at `folder`; its row of the table."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "look", str(folder / "records")]
    process = subprocess.Popen(
        [*command, "--out", str(folder / "report.html")], stdout=subprocess.DEVNULL
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"look exits {process.returncode}")
    wall_s = time.perf_counter() - started
    cpu_s = usage.ru_utime + usage.ru_stime
    return f"| {name} | {wall_s:.1f} | {cpu_s:.1f} | {usage.ru_maxrss / 1024:,.0f} |"


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
