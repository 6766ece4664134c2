# SPDX-License-Identifier: Apache-2.0
"""When the load was steady: neither still rising nor running out.

The number of sessions in flight rises at the beginning and falls once no session is
left to take the place of one that ends. Steady is from the moment it first reaches its
mean until the first session ends after the last one has begun; the mean is over the
time from the first beginning to that end. One rule for an open loop, where sessions
arrive, and for a closed one, where they begin together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np


class Window(NamedTuple):
    """From `start_ns` to before `end_ns`."""

    start_ns: int
    end_ns: int

    def part(self, intended_ns: int) -> Literal["warmup", "steady", "drain"]:
        """Where a request belongs: by when it was due, whenever it ended."""
        if intended_ns < self.start_ns:
            return "warmup"
        return "steady" if intended_ns < self.end_ns else "drain"


def steady_window(spans: Sequence[tuple[int, int]], warmup_ns: int) -> Window | None:
    """The steady window of sessions given as (begin_ns, end_ns > begin_ns).

    It starts no sooner than `warmup_ns` after the first beginning. None if nothing is
    left.
    """
    if not spans:
        return None
    begins, ends = np.array(spans, np.int64).T
    # Not the session that the last one took the place of, which ended as it began.
    end_ns = int(ends[ends > begins.max()].min())
    # In flight after each change, where one ends as another begins the end first.
    moments = np.concatenate([begins, ends])
    changes = np.concatenate([np.ones_like(begins), -np.ones_like(ends)])
    order = np.lexsort((changes, moments))
    moments, in_flight = moments[order], np.cumsum(changes[order])
    inside = moments < end_ns
    moments, in_flight = moments[inside], in_flight[inside]
    lengths_ns = np.diff(np.append(moments, end_ns))
    mean = (in_flight * lengths_ns).sum() / lengths_ns.sum()
    reached_ns = int(moments[np.argmax(in_flight >= mean)])
    start_ns = max(reached_ns, int(begins.min()) + warmup_ns)
    return Window(start_ns, end_ns) if start_ns < end_ns else None
