# SPDX-License-Identifier: Apache-2.0
"""A Python thread that keeps the GIL of its process busy, as a detokeniser may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

PERIOD_S = 0.02


@contextmanager
def busy_thread(share: float) -> Iterator[None]:
    """Compute in a thread for `share` of each 20 ms; without one if it is 0."""
    stopping = threading.Event()

    def spin() -> None:
        while not stopping.is_set():
            until_s = time.monotonic() + share * PERIOD_S
            while time.monotonic() < until_s:
                pass
            if share < 1:
                stopping.wait((1 - share) * PERIOD_S)

    thread = threading.Thread(target=spin)
    if share:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        if share:
            thread.join()


_of_this_rank = ExitStack()


def start_in_last_rank(worker: Any, share: float) -> None:
    """Begin a busy thread if this vLLM worker is that of the last rank."""
    if worker.rank == worker.parallel_config.world_size - 1:
        _of_this_rank.enter_context(busy_thread(share))


def stop(worker: Any) -> None:
    """End this rank's busy thread, if it has one."""
    _of_this_rank.close()
