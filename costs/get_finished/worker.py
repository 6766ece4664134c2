# SPDX-License-Identifier: Apache-2.0
"""One process with an engine core and a connector, its get_finished timed in each step.

Run by costs.get_finished with a private tree first on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lab.serving.connector import load_connector
from lab.serving.engine_process import serve
from lab.serving.null_engine import PROMPT_TOKENS, NullEngine
from lab.serving.settings import CPU_ENGINE

HELD_DEADLINE_S = 10.0


class TimedEngine(NullEngine):
    """An engine whose `get_finished_us` gets one value per step."""

    def __init__(self, model: Path, connector: str) -> None:
        of_connector = load_connector(connector).kv_transfer_config
        super().__init__(model, CPU_ENGINE.kv_transfer_config | of_connector)
        self.get_finished_us: list[float] = []
        group, clock = get_kv_transfer_group(), time.perf_counter_ns
        # From 0.30 on this is what the worker calls, and it calls the other.
        later = hasattr(group, "get_transfer_results")
        name = "get_transfer_results" if later else "get_finished"
        get_finished, note = getattr(group, name), self.get_finished_us.append

        def timed(*told):
            before = clock()
            finished = get_finished(*told)
            note((clock() - before) / 1e3)
            return finished

        setattr(group, name, timed)


@contextlib.contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """If `wanted`, a Python thread that never waits, as a detokeniser may be."""
    stopping = threading.Event()

    def spin() -> None:
        while not stopping.is_set():
            pass

    thread = threading.Thread(target=spin)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        if wanted:
            thread.join()


def time_parts(
    engine: TimedEngine, batch: int, steps: int, warm_up: int, busy: bool
) -> np.ndarray:
    """(2, steps): us of get_finished and of the whole step, decode-only steps."""
    ids = engine.decode_batch(batch, warm_up + steps)
    with busy_thread(busy):
        engine.time(warm_up)
        engine.get_finished_us.clear()
        whole = engine.time(steps)
        parts = np.array([engine.get_finished_us[:steps], whole])
    engine.core.abort_requests(ids)
    engine.run_to_end()
    # Not if sends are held; then the cache grows a little instead.
    engine.core.scheduler.reset_prefix_cache()
    return parts


def hold_sends(engine: TimedEngine, count: int) -> int:
    """Prefill `count` prompts whose blocks nobody pulls; how many the worker holds."""
    for number in range(count):
        params = {"do_remote_decode": True, "transfer_id": f"held-{number}"}
        engine.add([number % 1_000 + 1] * PROMPT_TOKENS, 1, params)
    engine.run_to_end()
    worker = getattr(get_kv_transfer_group(), "connector_worker", None)
    if worker is None:
        return 0
    # The worker's event loop takes them up some time after the step.
    deadline_s = time.monotonic() + HELD_DEADLINE_S
    while num_held(worker) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return num_held(worker)


def num_held(worker: Any) -> int:
    """Sends whose blocks are known to Mooncake's `worker` and wait to be pulled."""
    return sum(send.ready.is_set() for send in list(worker.reqs_need_send.values()))


def main() -> None:
    model, connector, socket = sys.argv[1:]
    serve(TimedEngine(Path(model), connector), socket, time_parts, hold_sends)


if __name__ == "__main__":
    main()
