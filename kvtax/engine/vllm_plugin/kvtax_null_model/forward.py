# SPDX-License-Identifier: Apache-2.0
"""The time that a forward would take on the device that the null model stands for."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    import torch


MOST_FORWARDS = 200_000


class SimulatedForward:
    """Duration of a forward on the simulated device, and the wait for it.

    forward_us + us_per_token * tokens of the batch + us_per_context_token * the sum of
    their positions (what a token attends to, prefilled or decoded) + us_per_kv_token *
    the tokens of their requests before them; launch_us if that is longer.

    The sleep releases the GIL, as waiting for a GPU does, so that the connector's own
    threads run as they would beside a real model.

    Where KVTAX_FORWARD_TOTALS names a file, it holds three int64: forwards so far,
    their nanoseconds as simulated and as slept. It is a mapping, so that whoever
    watches sees it grow and the process may be killed. Of several workers that compute
    a step together, one is `counted`. Where KVTAX_FORWARDS names a file, it holds a row
    for each of the first MOST_FORWARDS: when the forward ended and for how long it
    slept, both in nanoseconds, and zeros behind them.
    """

    COSTS = (
        "forward_us",
        "us_per_token",
        "us_per_context_token",
        "us_per_kv_token",
        "launch_us",
    )

    def __init__(
        self,
        forward_us: float = 0,
        us_per_token: float = 0,
        us_per_context_token: float = 0,
        us_per_kv_token: float = 0,
        launch_us: float = 0,
        counted: bool = True,
    ) -> None:
        self.forward_us = forward_us
        self.us_per_token = us_per_token
        self.us_per_context_token = us_per_context_token
        self.us_per_kv_token = us_per_kv_token
        self.launch_us = launch_us
        path = os.environ.get("KVTAX_FORWARD_TOTALS")
        self.totals: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]] | None = (
            numpy.memmap(path, numpy.int64, "w+", shape=(3,))
            if path and counted
            else None
        )
        path = os.environ.get("KVTAX_FORWARDS")
        self.each: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]] | None = (
            numpy.memmap(path, numpy.int64, "w+", shape=(MOST_FORWARDS, 2))
            if path and counted
            else None
        )
        self.forwards = 0

    def duration_us(
        self, tokens: int, context_tokens: float, kv_tokens: float = 0
    ) -> float:
        """Compute the duration of a forward over `tokens`.

        `context_tokens`: those that each of them attends to, summed up. `kv_tokens`:
        those of their requests before this step.
        """
        us = self.forward_us + self.us_per_token * tokens
        us += self.us_per_context_token * context_tokens
        us += self.us_per_kv_token * kv_tokens
        return max(us, self.launch_us)

    def duration_at_us(self, positions: torch.Tensor) -> float:
        """Compute the duration of a forward; `positions`: [tokens] of one step."""
        context_tokens = int(positions.sum()) if self.us_per_context_token else 0
        kv_tokens = _before(positions) if self.us_per_kv_token else 0
        return self.duration_us(positions.shape[0], context_tokens, kv_tokens)

    def wait(self, positions: torch.Tensor) -> None:
        """`positions`: [tokens] of one step."""
        started_ns = time.perf_counter_ns()
        simulated_us = self.duration_at_us(positions)
        time.sleep(simulated_us / 1e6)
        ended_ns = time.perf_counter_ns()
        slept_ns = ended_ns - started_ns
        if self.totals is not None:
            self.totals += (1, int(simulated_us * 1e3), slept_ns)
        if self.each is not None and self.forwards < MOST_FORWARDS:
            self.each[self.forwards] = ended_ns, slept_ns
            self.forwards += 1


def _before(positions: torch.Tensor) -> int:
    """Sum the first positions of all requests; a request's tokens follow each other."""
    follows = positions[1:] == positions[:-1] + 1
    return int(positions[0]) + int((positions[1:] * ~follows).sum())
