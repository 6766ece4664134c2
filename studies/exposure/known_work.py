# SPDX-License-Identifier: Apache-2.0
"""Known work in an engine: in methods of a connector, and in a Python thread.

The connector is loaded into the engine of the same process, which sets DELAY_US. The
thread keeps the GIL of its process busy, as a detokeniser may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from connectors.noop import NoopConnector
from connectors.synthetic_cost import WorkerReport

# One on each stretch of a step: schedule(), the update, before the launch and after.
METHODS = (
    "build_connector_meta",
    "update_connector_output",
    "start_load_kv",
    "get_finished",
)
DELAY_US: dict[str, float] = dict.fromkeys(METHODS, 0.0)


def _delayed(name: str):
    def method(self, *args, **kwargs):
        result = getattr(NoopConnector, name)(self, *args, **kwargs)
        # By the thread's own clock: while it is preempted, no work is done.
        end_ns = time.thread_time_ns() + DELAY_US[name] * 1e3
        while time.thread_time_ns() < end_ns:
            pass
        return result

    return method


class DelayingConnector(NoopConnector):
    def build_connector_worker_meta(self) -> WorkerReport:
        # So that vLLM calls update_connector_output in each step.
        return WorkerReport()


for _name in METHODS:
    setattr(DelayingConnector, _name, _delayed(_name))


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
