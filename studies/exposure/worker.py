# SPDX-License-Identifier: Apache-2.0
"""An engine core on a null device, under load, for one config and way of scheduling.

Run by studies.exposure on a patched vLLM. Requests arrive whatever the engine does,
and each is noted as a client would see it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from itertools import count, pairwise
from pathlib import Path
from typing import Literal

from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine
from kvtax.stats.quantiles import tpot_of
from studies.exposure.known_work import DELAY_US, start_in_last_rank, stop

FILLING_TOKENS = 256 * BLOCK_SIZE
POLL_S = 0.0005


class Bench:
    def __init__(
        self,
        model: Path,
        kv_transfer: dict | None,
        arguments: dict,
        how: Literal["sync", "async"],
    ):
        self.engine = NullEngine(model, kv_transfer, null_device=how, **arguments)
        self.numbers = count(1)

    def prompt(self, tokens: int) -> list[int]:
        """One that shares no block with any other."""
        high, low = divmod(next(self.numbers), 900)
        return [high + 1, low + 1] * (tokens // 2)

    def finish(self) -> None:
        core = self.engine.core
        while core.scheduler.has_requests() or core.batch_queue:
            core.step_fn()


def fill(bench: Bench, blocks: int) -> int:
    """Cache at least so many blocks; how many there are."""
    pool = bench.engine.core.scheduler.kv_cache_manager.block_pool
    while len(pool.cached_block_hash_to_block) < blocks:
        bench.engine.add(bench.prompt(FILLING_TOKENS), 1)
        bench.finish()
    return len(pool.cached_block_hash_to_block)


def load(
    bench: Bench,
    delay_us: dict[str, float],
    busy: float,
    rate_rps: float,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
) -> tuple[int, int, list[float], list[float], list[float]]:
    """Return the steps [first, end), TTFT and TPOT in ms by request, and token gaps.

    Arrivals are a Poisson process of `rate_rps`; all at once if it is 0. A Python
    thread of the last rank's process computes for a share `busy` of the time.
    """
    DELAY_US.update(delay_us)
    chance = random.Random(seed)
    due_s: deque[float] = deque()
    at_s = 0.0
    for _ in range(requests):
        due_s.append(at_s)
        at_s += chance.expovariate(rate_rps) if rate_rps else 0.0
    recorder = bench.engine.core._kvtax_recorder
    first_step = recorder.next_step_id
    ranks = bench.engine.core.model_executor
    ranks.collective_rpc(start_in_last_rank, args=(busy,))
    try:
        tokens_s, arrival_s = serve_all(bench, due_s, prompt_tokens, output_tokens)
    finally:
        # Otherwise the thread would keep a process alive that has failed.
        ranks.collective_rpc(stop)
    DELAY_US.update(dict.fromkeys(DELAY_US, 0.0))
    ttft_ms = [1e3 * (tokens_s[one][0] - at) for one, at in arrival_s.items()]
    tpot_s = [tpot_of(one[0], one[-1], len(one)) for one in tokens_s.values()]
    tpot_ms = [1e3 * each for each in tpot_s if each is not None]
    gaps_ms = [
        1e3 * (later - earlier)
        for times in tokens_s.values()
        for earlier, later in pairwise(times)
    ]
    return first_step, recorder.next_step_id, ttft_ms, tpot_ms, gaps_ms


def serve_all(
    bench: Bench, due_s: deque[float], prompt_tokens: int, output_tokens: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Step until all are served: seconds of each token and of arrival, by request."""
    core = bench.engine.core
    began_s = time.perf_counter()
    tokens_s: dict[str, list[float]] = {}
    arrival_s: dict[str, float] = {}
    while due_s or core.scheduler.has_requests() or core.batch_queue:
        now_s = time.perf_counter() - began_s
        while due_s and due_s[0] <= now_s:
            due = due_s.popleft()
            request = bench.engine.add(bench.prompt(prompt_tokens), output_tokens)
            arrival_s[request] = due
        if not core.scheduler.has_requests() and not core.batch_queue:
            time.sleep(min(max(due_s[0] - now_s, 0), POLL_S))
            continue
        outputs, _ = core.step_fn()
        now_s = time.perf_counter() - began_s
        for of_client in (outputs or {}).values():
            for one in of_client.outputs:
                times = tokens_s.setdefault(one.request_id, [])
                times += [now_s] * len(one.new_token_ids)
    return tokens_s, arrival_s


def main() -> None:
    model, given, how, socket = sys.argv[1:]
    options = json.loads(given)
    null_device: Literal["sync", "async"] = "async" if how == "async" else "sync"
    arguments = options["kv_transfer"], options["arguments"], null_device
    bench = Bench(Path(model), *arguments)
    # The recorder attaches in the first step.
    fill(bench, 1)
    serve(bench, socket, fill, load)


if __name__ == "__main__":
    main()
