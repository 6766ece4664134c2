# SPDX-License-Identifier: Apache-2.0
"""Metrics that may grow with |cache|, each a column of the table of holds.

`calls` are the connector's calls, all of them, in all steps of a hold: nothing is cut
away, so a cost in few steps counts in full. `timed` is what scheduler and connector
take of a step: schedule(), update_from_output() and the connector's calls in the
worker, without the slowest tenth of the steps, which stalls of the machine are in.
`prefill` are the calls in steps with prefill. Names in `_many` are of holds with many
requests. CPU time beside the step is that of `threads` of the engine's process which
are not vLLM's own, and of all `processes` of the server. `tpot` is the time per output
token as clients see it, without the model's sleep, `step` the whole engine step. Behind
some holds there are a request after a second of idleness, prompts that hit the prefix
cache and long prompts: `after_idle`, `hit` and `long_prompt` are the connector's calls
in their steps, per request.

All are in us, and are judged as shares of vLLM's own work in the same hold. Own work is
a part of `tpot` and `step`, and a cost that slows it down, such as a thread that keeps
the interpreter, would hide: they are shares of the server's own work over all of its
holds. `memory` is in MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """`margin` is the share of own work that a full cache may add to what is flat.

    Where a metric `decides`, nothing is flat without it.
    """

    margin: float
    decides: bool = False
    many: bool = False
    of: Literal["own work of the hold", "own work of the server", "MiB"] = (
        "own work of the hold"
    )


TIMED, TIMED_MANY, CALLS, CALLS_MANY = "timed", "timed_many", "calls", "calls_many"
PREFILL, RARE, LONG_CALLS = "prefill", "rare", "long calls"
THREADS, PROCESSES, TPOT, MEMORY = "threads", "processes", "tpot", "memory"
AFTER_IDLE, HIT, LONG_PROMPT = "after_idle", "hit", "long_prompt"
SCHEDULE, STEP = "schedule", "step"
# Own work of a decode step is some 600 us: 5 % of it are 0.4 % of a 7 ms forward.
METRICS = {
    CALLS: Metric(0.05, decides=True),
    CALLS_MANY: Metric(0.10, decides=True, many=True),
    TIMED: Metric(0.05, decides=True),
    TIMED_MANY: Metric(0.10, decides=True, many=True),
    # 25 % are 150 us, 0.2 % of a prompt's 100 ms.
    PREFILL: Metric(0.25, decides=True),
    THREADS: Metric(0.05, decides=True),
    TPOT: Metric(0.10, of="own work of the server"),
    STEP: Metric(0.10, of="own work of the server"),
    PROCESSES: Metric(0.10),
    AFTER_IDLE: Metric(0.25),
    HIT: Metric(0.25),
    LONG_PROMPT: Metric(0.25),
    MEMORY: Metric(64.0, of="MiB"),
}
# Where the connector's calls are known whole, they decide in the place of these.
DECIDED_BY_CALLS = {TIMED: CALLS, TIMED_MANY: CALLS_MANY}
# Columns that are fitted, and not judged.
DESCRIBED = (SCHEDULE,)


def is_part(name: str) -> bool:
    """Return whether a column is a method of the connector or a thread."""
    return name.startswith(("scheduler.", "worker.", THREAD_PART))


THREAD_PART = "thread "
