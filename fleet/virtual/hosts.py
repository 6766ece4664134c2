# SPDX-License-Identifier: Apache-2.0
"""Make a file of configs/hosts/: what a host takes per step and per request.

    python -m fleet.virtual.hosts --cells DIR [--requests RUN_DIR] --summary TEXT FILE

DIR holds the observatory's cells of one release, RUN_DIR is a run of fleet.experiment
in real time. Without it, requests take nothing outside of the engine. Exit status 0; 2
with a message if something cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleet.virtual.host_cells import step_times
from fleet.virtual.host_requests import request_times
from lab.records import RecordsError
from lab.records.documents import write_document
from lab.records.host_times import HostTimes, RequestTimes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.virtual.hosts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cells", type=Path, required=True, metavar="DIR")
    parser.add_argument("--requests", type=Path, metavar="RUN_DIR")
    parser.add_argument("--summary", required=True, help="which host this is")
    parser.add_argument("out", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        steps = step_times(options.cells)
        requests = RequestTimes()
        if options.requests:
            requests = request_times(options.requests)
    except RecordsError as error:
        print(f"fleet.virtual.hosts: {error}", file=sys.stderr)
        return 2
    write_document(options.out, HostTimes(options.summary, steps, requests))
    print(f"wrote {options.out}: {', '.join(steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
