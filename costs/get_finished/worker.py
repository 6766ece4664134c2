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

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lab.serving.connector import load_connector
from lab.serving.engine_process import serve
from lab.serving.null_engine import PROMPT_TOKENS, NullEngine
from lab.serving.settings import CPU_ENGINE


class TimedEngine(NullEngine):
    """`get_finished_us` gets one value a step."""

    def __init__(self, model: Path, connector: str) -> None:
        kv_transfer = CPU_ENGINE.kv_transfer_config
        kv_transfer |= load_connector(connector).kv_transfer_config
        super().__init__(model, kv_transfer)
        self.get_finished_us: list[float] = []
        group, clock = get_kv_transfer_group(), time.perf_counter_ns
        get_finished, note = group.get_finished, self.get_finished_us.append

        def timed(finished_req_ids):
            before = clock()
            finished = get_finished(finished_req_ids)
            note((clock() - before) / 1e3)
            return finished

        group.get_finished = timed


@contextlib.contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """A thread in pure Python that never waits, as detokenisers and loggers may be."""
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
    """Prefills whose blocks nobody pulls; how many the worker then holds."""
    for number in range(count):
        params = {"do_remote_decode": True, "transfer_id": f"held-{number}"}
        engine.add([number % 1_000 + 1] * PROMPT_TOKENS, 1, params)
    engine.run_to_end()
    worker = getattr(get_kv_transfer_group(), "connector_worker", None)
    return len(worker.reqs_need_send) if worker else 0


def main() -> None:
    model, connector, socket = sys.argv[1:]
    serve(TimedEngine(Path(model), connector), socket, time_parts, hold_sends)


if __name__ == "__main__":
    main()
