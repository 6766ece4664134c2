# SPDX-License-Identifier: Apache-2.0
"""Cost of every connector per step on every release, and its growth along axes."""

from typing import NamedTuple

# The variable with what the worker is given; a command line would show its secrets.
GIVEN = "KVTAX_CELL"


class Held(NamedTuple):
    """Steps [first, end) of a hold, when it was, and CPU time per step beside them.

    `time_s` is since the engine started, `age_s` since the prefix cache was reset.
    """

    first: int
    end: int
    time_s: float
    age_s: float
    threads_us: float
    processes_us: float
