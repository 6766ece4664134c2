# SPDX-License-Identifier: Apache-2.0
"""What is measured in a worker of Ray must run as it does without Ray."""

from __future__ import annotations

import os


class Unfit(Exception):
    """What is measured on this host would not be what is asked for."""


def as_without_ray() -> None:
    """Undo what Ray gives to its workers' children. Raises Unfit if that cannot be."""
    # Ray sets it to 1 in its workers. PyTorch would have one thread.
    os.environ.pop("OMP_NUM_THREADS", None)
    if (niceness := os.nice(0)) > 0:
        raise Unfit(
            f"Ray's workers run at niceness {niceness} there, and wait for all other "
            "processes: set RAY_worker_niceness=0 for `ray start`"
        )
