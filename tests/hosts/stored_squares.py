# SPDX-License-Identifier: Apache-2.0
"""Squares made on a cluster and put into a store: a line of JSON for each.

python -m tests.hosts.stored_squares ADDRESS COUNT SECONDS_EACH URL
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from lab.hosts.delivered import Work, delivered
from lab.hosts.errors import HostsError
from lab.serving.supervise import exit_on_signals
from lab.store.errors import StoreError
from lab.store.store import store_of_run


def main() -> int:
    address, count, seconds, url = sys.argv[1:]
    exit_on_signals()
    tasks = {f"s/{one}": f"{one} {seconds}".encode() for one in range(int(count))}
    work = Work("tests.hosts.squares", {}, tasks)
    try:
        store = store_of_run(url, "run", resume=True)
        with tempfile.TemporaryDirectory() as aside:
            for one in delivered(address, work, Path(aside), store, lambda *of: True):
                square = int((one.folder / "square").read_text())
                value = int(one.name.removeprefix("s/"))
                print(json.dumps([value, square, one.host]), flush=True)
    except (HostsError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
