# SPDX-License-Identifier: Apache-2.0
"""A command whose tasks square numbers on the hosts of a Ray cluster.

    python -m tests.hosts.spread_squares ADDRESS SECONDS measures|simulates NUMBER...

Prints a line of JSON for each as it is done: number, square, host, and when.
"""

from __future__ import annotations

import json
import sys

from kvtax.hosts import Cluster, HostsError, Task, finished_tasks
from kvtax.signals import exit_on_signals
from tests.hosts.squares import square


def main() -> int:
    exit_on_signals()
    address, seconds, kind, *numbers = sys.argv[1:]
    insecure = "--insecure" in numbers
    numbers = [number for number in numbers if number != "--insecure"]
    cluster = Cluster(address, insecure)
    tasks = [Task(n, square, (int(n), float(seconds))) for n in numbers]
    try:
        for done in finished_tasks(cluster, tasks, kind == "measures"):
            value = int(done.files["deep/square"])
            when = json.loads(done.files["when"])
            print(json.dumps([int(done.name), value, done.host, *when]), flush=True)
    except HostsError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
