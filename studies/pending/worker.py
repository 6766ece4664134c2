# SPDX-License-Identifier: Apache-2.0
"""An engine with a connector, whose lists of pending work are filled, and timed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from connectors.noop import NoopConnector, NoopMetadata
from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.stats.distribution import Floats

BATCH, FOREVER_S = 8, 1e6
# Stores of one event, of one step.
EVENT_KEYS = 1_000
LAYERS = 48
# Seconds between two pulls that arrive, on average.
GAP_S = 0.05
PULLER = {
    "kv_connector": "PullingConnector",
    "kv_connector_module_path": "studies.pending.worker",
    "kv_role": "kv_both",
}


class Leases(dict[str, float]):
    """Expiry by request; `earliest` is before all of them, or one of them."""

    earliest = float("inf")

    def __setitem__(self, request: str, expiry: float) -> None:
        super().__setitem__(request, expiry)
        self.earliest = min(self.earliest, expiry)


class PullMetadata(NoopMetadata):
    """Requests to pull."""

    def __init__(self, requests: list[str]) -> None:
        self.requests = requests


class PullingConnector(NoopConnector):
    """Every request with a `pull` is to be loaded, and has been at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._to_pull: list[str] = []
        self._finished: set[str] = set()
        self.started_s: dict[str, float] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if not (request.kv_transfer_params or {}).pop("pull", False):
            return 0, False
        self._to_pull.append(request.request_id)
        return request.num_prompt_tokens - 1 - num_computed_tokens, True

    def build_connector_meta(self, scheduler_output: Any) -> PullMetadata:
        to_pull, self._to_pull = self._to_pull, []
        return PullMetadata(to_pull)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        now_s = time.monotonic()
        for request in self._get_connector_metadata().requests:
            self.started_s[request] = now_s
            self._finished.add(request)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        finished, self._finished = self._finished, set()
        return None, finished or None


class PendingEngine:
    """An engine core with the connector of a config, or with one that pulls."""

    def __init__(self, model: str, config: str) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        transfer = PULLER
        if config != "pulling":
            transfer = load_connector(config).kv_transfer_config or {}
        whole = CPU_ENGINE.kv_transfer_config | transfer
        self.engine = NullEngine(Path(model), whole, num_blocks=36_000)
        self.worker_side = get_kv_transfer_group()
        self.scheduler_side: Any = self.engine.core.scheduler.connector

    def timed(self, function: Callable[[], object], calls: int) -> Floats:
        """us of each of `calls` calls."""
        clock, times = time.perf_counter_ns, []
        for _ in range(calls):
            before = clock()
            function()
            times.append((clock() - before) / 1e3)
        return np.array(times)


def time_held_sends(
    pending: PendingEngine, held: int, earliest: bool, calls: int
) -> Floats:
    """Time NIXL's get_transfer_results while `held` requests wait to be fetched.

    With `earliest` no lease is looked at before the earliest one ends.
    """
    worker = pending.worker_side.connector_worker
    leases = Leases()
    far = time.perf_counter() + FOREVER_S
    for number in range(held):
        leases[f"chatcmpl-{number:032x}"] = far + number
    reap = type(worker)._reap_expired_send_leases

    def reap_when_due(done: set[str]) -> None:
        if time.perf_counter() >= leases.earliest:
            reap(worker, done)
            leases.earliest = min(leases.values(), default=float("inf"))

    worker._reqs_to_send = leases if earliest else dict(leases)
    if earliest:
        worker._reap_expired_send_leases = reap_when_due
    try:
        return pending.timed(worker.get_transfer_results, calls)
    finally:
        worker.__dict__.pop("_reap_expired_send_leases", None)
        worker._reqs_to_send = {}


def time_keys_in_flight(pending: PendingEngine, keys: int, calls: int) -> Floats:
    """Time UMBP's build_connector_meta while `keys` of blocks are being stored."""
    from vllm.distributed.kv_transfer.kv_connector.v1.umbp.data import BlockStoreBatch
    from vllm.distributed.kv_transfer.kv_connector.v1.umbp.scheduler import _StoreEvent
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduler = pending.scheduler_side.connector_scheduler
    for event in range(0, keys, EVENT_KEYS):
        some = range(event, min(event + EVENT_KEYS, keys))
        names = [f"0:0:{key:064x}" for key in some]
        column = [0] * len(names)
        hashes = [b""] * len(names)
        batch = BlockStoreBatch(
            names, column, column, hashes, list(hashes), [()] * len(names), column, "r"
        )
        scheduler._store_events[-1 - event] = _StoreEvent((batch,))
    output = SchedulerOutput.make_empty()
    try:
        return pending.timed(lambda: scheduler.build_connector_meta(output), calls)
    finally:
        scheduler._store_events.clear()


class UnderWay:
    """Transfer that has neither failed nor ended."""

    def Failed(self) -> bool:
        return False

    def Succeeded(self) -> bool:
        return False


def time_transfers(pending: PendingEngine, transfers: int, calls: int) -> Floats:
    """Time MoRIIO's poll of `transfers` of all layers each, whose state is a stub."""
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio import (
        moriio_connector,
        moriio_engine,
    )

    poll = moriio_engine.MoRIIOWrapper.poll_transfer_batch
    wrapper = SimpleNamespace(lock=threading.Lock())
    wrapper.poll_transfer_batch = lambda statuses: poll(wrapper, statuses)
    names = [f"chatcmpl-{number:032x}" for number in range(transfers)]
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    worker = SimpleNamespace(
        moriio_wrapper=wrapper,
        moriio_config=SimpleNamespace(recv_abort_timeout=FOREVER_S),
        _recving_transfers={
            name: {layer: [UnderWay()] for layer in layers} for name in names
        },
        _recving_transfers_start=dict.fromkeys(names, time.monotonic()),
    )
    pop = moriio_connector.MoRIIOConnectorWorker._pop_done_transfers
    return pending.timed(lambda: pop(worker), calls)


def time_pulls(pending: PendingEngine, pulls: int) -> Floats:
    """Time from a pull's arrival until the connector may start it: (2, pulls) ms.

    Eight requests decode. Pulls arrive at random, in the middle of a step mostly, and
    are queued as vLLM queues them: until the next step begins. The second row is the
    mean time of a step meanwhile.
    """
    engine = pending.engine
    ids = engine.decode_batch(BATCH, 4_000)
    arrivals: SimpleQueue[tuple[float, int]] = SimpleQueue()
    random, done = Random(0), pending.worker_side.started_s
    done.clear()

    def arrive() -> None:
        for number in range(pulls):
            time.sleep(random.expovariate(1 / GAP_S))
            arrivals.put((time.monotonic(), number))

    arrived_s: dict[str, float] = {}
    thread = threading.Thread(target=arrive)
    thread.start()
    began_s, steps = time.monotonic(), 0
    while len(done) < pulls:
        while not arrivals.empty():
            when_s, number = arrivals.get()
            name = engine.add([number + 900, 7] * 64, 1, {"pull": True})
            arrived_s[name] = when_s
        engine.core.step()
        steps += 1
    step_ms = 1e3 * (time.monotonic() - began_s) / steps
    thread.join()
    waits = [1e3 * (done[name] - when_s) for name, when_s in arrived_s.items()]
    engine.end_batch(ids)
    return np.array([waits, [step_ms] * pulls])


if __name__ == "__main__":
    model, config, socket = sys.argv[1:]
    serve(
        PendingEngine(model, config),
        socket,
        time_held_sends,
        time_keys_in_flight,
        time_transfers,
        time_pulls,
    )
