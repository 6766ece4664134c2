# SPDX-License-Identifier: Apache-2.0
"""Squares made on a cluster: a line of JSON for each, as soon as it is done.

python -m tests.hosts.spread_squares ADDRESS COUNT SECONDS_EACH [STORE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from kvtax.hosts.errors import HostsError, StoreError
from kvtax.hosts.store import store_of_run
from kvtax.hosts.work import Work, finished_tasks
from kvtax.signals import exit_on_signals


def main() -> int:
    address, count, seconds, *url = sys.argv[1:]
    exit_on_signals()
    tasks = {f"s/{value}": f"{value} {seconds}".encode() for value in range(int(count))}
    work = Work("tests.hosts.squares", {}, tasks)
    try:
        store = store_of_run(*url, "run", resume=True) if url else None
        with tempfile.TemporaryDirectory() as aside:
            for task in finished_tasks(address, work, Path(aside), store):
                square = int((task.folder / "square").read_text())
                value = int(task.name.removeprefix("s/"))
                print(json.dumps([value, square, task.host]), flush=True)
    except (HostsError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
