# SPDX-License-Identifier: Apache-2.0
"""What handing out a task to a host costs: tasks that take no time, over a Ray cluster.

Starts a cluster of one host, and stops it. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from costs.hosts.ray_here import ray_here
from lab.hosts.apart import spread
from lab.serving.supervise import exit_on_signals

MODULE = "costs.hosts.nothing"
# About what a run in virtual time leaves of 300 requests.
RESULT_BYTES = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.hosts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--tasks", type=int, default=2_000)
    chosen = parser.parse_args()
    exit_on_signals()
    with ray_here() as address:
        moments_s = seconds_of_tasks(address, chosen.tasks)
    # The first result comes when the host's process has started.
    each_ms = (moments_s[-1] - moments_s[0]) / (len(moments_s) - 1) * 1e3
    print("| tasks | first result after, s | ms per task | the 90 % between, ms |")
    print("|---:|---:|---:|---:|")
    low_ms, high_ms = np.percentile(np.diff(moments_s) * 1e3, [5, 95])
    print(
        f"| {chosen.tasks:,} | {moments_s[0]:.1f} | {each_ms:.2f} | "
        f"{low_ms:.2f} to {high_ms:.2f} |"
    )


def seconds_of_tasks(address: str, count: int) -> list[float]:
    """When each result came, in s since the first was asked for."""
    tasks = [os.urandom(RESULT_BYTES) for _ in range(8)]
    asked = [tasks[number % 8] for number in range(count)]
    began_s = time.monotonic()
    return [time.monotonic() - began_s for _ in spread(address, MODULE, {}, asked)]


if __name__ == "__main__":
    main()
