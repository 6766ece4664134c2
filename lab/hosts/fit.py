# SPDX-License-Identifier: Apache-2.0
"""Makes a process that Ray started, by way of an agent, like one that it did not."""

from __future__ import annotations

import os


class Unfit(Exception):
    """What runs on this host would not be what was asked for; the message says why."""


def as_without_ray() -> None:
    """Servers are to run as they do without Ray. Raises Unfit."""
    # Ray sets it to 1 in its workers. PyTorch would have one thread.
    os.environ.pop("OMP_NUM_THREADS", None)
    if (niceness := os.nice(0)) > 0:
        raise Unfit(
            f"Ray's workers run at niceness {niceness} there, and wait for all other "
            "processes: set RAY_worker_niceness=0 for `ray start`"
        )
