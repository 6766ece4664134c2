# SPDX-License-Identifier: Apache-2.0
"""How long the analysis of 10 million steps takes, and how much memory.

A run of one trial is written to a temporary folder, with an engine and a worker record
per step (4.1 GB at 10 million). A fresh process then does what `python -m
microbench.report` does before it draws: it loads, joins, filters, and computes levels,
slopes and the verdict. Prints JSON. Exits with 1 if that takes 10 s or 2 GB of peak
resident memory: our promise for 10 million steps on 2 cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from costs.report.analyse import Taken
from costs.report.made_up_run import write_run

MOST_S = 10.0
MOST_MB = 2_000.0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m costs.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--records", type=int, default=10_000_000, help="of each kind")
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory(prefix="costs_report.") as folder:
        write_run(Path(folder), count)
        command = [sys.executable, "-m", "costs.report.analyse", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    taken = msgspec.json.decode(done.stdout, type=Taken)
    print(msgspec.json.format(msgspec.json.encode(taken)).decode())
    return int(taken.all_s >= MOST_S or taken.peak_rss_mb >= MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
