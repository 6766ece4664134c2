# SPDX-License-Identifier: Apache-2.0
"""An engine that times get_finished in each step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.stats.distribution import Floats
from studies.busy_python import busy_thread

HELD_SENDS, HELD_DEADLINE_S = 16, 10.0


class TimedEngine:
    """An engine on the null model; `get_finished_us` receives one value per step."""

    def __init__(self, model: Path, connector: str) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvtax.engine.null_engine import NullEngine

        of_connector = load_connector(connector).kv_transfer_config or {}
        transfer = CPU_ENGINE.kv_transfer_config | of_connector
        self.engine = NullEngine(model, transfer)
        self.group = get_kv_transfer_group()
        self.get_finished_us: list[float] = []
        # From 0.30 on this is what the worker calls, and it calls the other.
        later = hasattr(self.group, "get_transfer_results")
        name = "get_transfer_results" if later else "get_finished"
        get_finished, clock = getattr(self.group, name), time.perf_counter_ns
        note = self.get_finished_us.append

        def timed(*arguments: Any) -> Any:
            before = clock()
            finished = get_finished(*arguments)
            note((clock() - before) / 1e3)
            return finished

        setattr(self.group, name, timed)


def time_parts(
    timed: TimedEngine, batch: int, steps: int, warm_up: int, busy: bool
) -> Floats:
    """Time get_finished and the whole step, decode-only: (2, steps) us."""
    engine = timed.engine
    ids = engine.decode_batch(batch, warm_up + steps)
    with busy_thread(busy):
        engine.time(warm_up)
        timed.get_finished_us.clear()
        whole = engine.time(steps)
        parts = np.array([timed.get_finished_us[:steps], whole])
    engine.core.abort_requests(ids)
    engine.run_to_end()
    # Not if sends are held; then the cache grows a little instead.
    engine.core.scheduler.reset_prefix_cache()
    return parts


def hold_sends(timed: TimedEngine) -> int:
    """Prefill prompts whose blocks nobody pulls; return how many the worker holds."""
    from kvtax.engine.null_engine import PROMPT_TOKENS

    for number in range(HELD_SENDS):
        params = {"do_remote_decode": True, "transfer_id": f"held-{number}"}
        timed.engine.add([number % 1_000 + 1] * PROMPT_TOKENS, 1, params)
    timed.engine.run_to_end()
    worker = getattr(timed.group, "connector_worker", None)
    if worker is None:
        return 0

    def held() -> int:
        sends = list(worker.reqs_need_send.values())
        return sum(send.ready.is_set() for send in sends)

    # The worker's event loop takes them up some time after the step.
    deadline_s = time.monotonic() + HELD_DEADLINE_S
    while held() < HELD_SENDS and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return held()


if __name__ == "__main__":
    model, connector, socket = sys.argv[1:]
    serve(TimedEngine(Path(model), connector), socket, time_parts, hold_sends)
