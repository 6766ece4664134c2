# SPDX-License-Identifier: Apache-2.0
"""One process with vLLM's engine core on the null model, stepped on demand.

Run by costs.hooks.overhead with a private tree first on PYTHONPATH. It listens on a
Unix socket and answers requests for rounds of decode-only steps until the parent
goes away.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from lab.serving.engine_process import serve

BLOCK_SIZE = 16
PROMPT_TOKENS = 64
# Steps before the measured ones of a round: caches and branch predictors are cold
# after another process had the core.
WARM_UP_STEPS = 50
# Steps in a row in one mode, where modes alternate within the process.
CHUNK_STEPS = 10
MAX_MODEL_LEN = 8_192
MAX_REQUESTS = 64
# Sequences of hook calls timed at once: far shorter than the writer's interval.
LOOP_STEPS = 1_000
# All hooks around connector methods run, and the methods themselves do nothing.
NOOP = {
    "kv_connector": "NoopConnector",
    "kv_connector_module_path": "connectors.noop",
    "kv_role": "kv_both",
}


class NullEngine:
    """An engine core in this process, one request scheduler and one worker.

    `kv_transfer` is vLLM's --kv-transfer-config. Prompts are token ids, outputs the
    null model's zeros.
    """

    def __init__(
        self, model: Path, kv_transfer: dict[str, Any] | None, num_blocks: int = 8_000
    ) -> None:
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=8_192,
            max_num_seqs=MAX_REQUESTS,
            kv_transfer_config=kv_transfer,
        ).create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._num_blocks = num_blocks
        self._ids = count()

    def add(
        self,
        prompt: list[int],
        output_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> str:
        """Queue a request that ends after exactly `output_tokens`; its id."""
        extra = kv_transfer_params and {"kv_transfer_params": kv_transfer_params}
        request_id = str(next(self._ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0,
                max_tokens=output_tokens,
                ignore_eos=True,
                extra_args=extra,
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))
        return request_id

    def run_to_end(self) -> None:
        """Step until nothing is left to do."""
        while self.core.scheduler.has_requests():
            self.core.step()

    def decode_batch(self, batch: int, steps: int) -> list[str]:
        """Prefill `batch` requests and leave at least `steps` decode-only steps.

        Raises ValueError if they do not fit into the engine.
        """
        tokens = PROMPT_TOKENS + steps + 2
        blocks = batch * -(-tokens // BLOCK_SIZE)
        if tokens > MAX_MODEL_LEN or batch > MAX_REQUESTS or blocks >= self._num_blocks:
            raise ValueError(
                f"{batch} requests of {tokens} tokens do not fit: at most "
                f"{MAX_REQUESTS} of {MAX_MODEL_LEN}, {self._num_blocks} blocks in all"
            )
        first = next(self._ids)
        ids = [
            # Prompts that share no block, or the first would serve the others.
            self.add(_numbered(first + row), steps + 2)
            for row in range(batch)
        ]
        self.core.step()
        return ids

    def end_batch(self, ids: list[str]) -> None:
        """Abort the requests and forget their blocks: each round starts alike."""
        self.core.abort_requests(ids)
        self.run_to_end()
        assert self.core.scheduler.reset_prefix_cache()

    def time(self, steps: int) -> list[float]:
        """us of that many engine steps, taken around EngineCore.step()."""
        step, clock = self.core.step, time.perf_counter_ns
        times = []
        for _ in range(steps):
            before = clock()
            step()
            times.append((clock() - before) / 1e3)
        return times


def _numbered(number: int) -> list[int]:
    """A prompt of its own for each number below a million, in the first block too."""
    high, low = divmod(number, 1_000)
    return [high + 1, low + 1] * (PROMPT_TOKENS // 2)


# What is on: (engine hooks, worker hooks). The worker's alone would record nothing,
# as its step_id comes from the engine's.
MODES = {"off": (False, False), "engine": (True, False), "both": (True, True)}


def switch(engine: bool, worker: bool) -> None:
    """Turn the recorders of this process on or off, between two steps."""
    from vllm.v1 import step_records
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker, kv_connector_model_runner_mixin

    for module in (scheduler, core):
        module.ENGINE_STEPS = step_records.ENGINE_STEPS if engine else None
    for module in (gpu_worker, kv_connector_model_runner_mixin):
        module.WORKER_STEPS = step_records.WORKER_STEPS if worker else None


def time_steps(engine: NullEngine, batch: int, steps: int) -> np.ndarray:
    """(steps,) us of decode-only steps of one batch."""
    ids = engine.decode_batch(batch, WARM_UP_STEPS + steps)
    engine.time(WARM_UP_STEPS)
    times = engine.time(steps)
    engine.end_batch(ids)
    return np.array(times)


def time_modes(
    engine: NullEngine, batch: int, steps: int, seed: int
) -> dict[str, np.ndarray]:
    """(steps,) us of decode-only steps in each of MODES, in turns of CHUNK_STEPS."""
    order = random.Random(seed)
    chunks = -(-steps // CHUNK_STEPS)
    total = chunks * CHUNK_STEPS * len(MODES)
    ids = engine.decode_batch(batch, WARM_UP_STEPS + total)
    engine.time(WARM_UP_STEPS)
    times: dict[str, list[int]] = {mode: [] for mode in MODES}
    for _ in range(chunks):
        for mode in order.sample(list(MODES), len(MODES)):
            switch(*MODES[mode])
            times[mode] += engine.time(CHUNK_STEPS)
    switch(True, True)
    engine.end_batch(ids)
    return {mode: np.array(values[:steps]) for mode, values in times.items()}


def time_hooks(engine: NullEngine, batch: int, loops: int) -> dict[str, np.ndarray]:
    """(loops,) us a step: its hooks in a tight loop, and writing its record."""
    from vllm.v1 import step_records
    from vllm.v1.step_records import now_ns

    scheduler = engine.core.scheduler
    ids = engine.decode_batch(batch, WARM_UP_STEPS)
    output = scheduler.schedule()

    def engine_step(steps) -> None:
        steps.schedule_began_ns = now_ns()
        steps.began_ns = now_ns()
        steps.build_meta_ns = now_ns() - steps.began_ns
        steps.end_schedule(scheduler, output)
        steps.note_block_pool(scheduler, output)
        steps.began_ns = now_ns()
        steps.update_ns = now_ns() - steps.began_ns
        steps.end_step(output)
        steps.end_step(output)

    def worker_step(steps) -> None:
        steps.begin_step(0, output)
        steps.began_ns = now_ns()
        steps.bind_ns += now_ns() - steps.began_ns
        steps.began_ns = now_ns()
        steps.start_load_kv_ns += now_ns() - steps.began_ns
        steps.began_ns = now_ns()
        steps.wait_for_save_ns += now_ns() - steps.began_ns
        steps.began_ns = now_ns()
        steps.get_finished_ns += now_ns() - steps.began_ns
        steps.end_execute_model()

    times: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, steps, hooks in (
            ("engine", step_records.EngineStepRecorder(folder), engine_step),
            ("worker", step_records.WorkerStepRecorder(folder), worker_step),
        ):
            hooks(steps)
            hooks(steps)
            for _ in range(loops):
                start = now_ns()
                for _ in range(LOOP_STEPS):
                    hooks(steps)
                middle = now_ns()
                steps._file.flush()
                times.setdefault(name, []).append(middle - start)
                times.setdefault(f"{name} record", []).append(now_ns() - middle)
    engine.end_batch(ids)
    return {name: np.array(taken) / LOOP_STEPS / 1e3 for name, taken in times.items()}


def main() -> None:
    model, socket = sys.argv[1:]
    engine = NullEngine(Path(model), NOOP)
    serve(engine, socket, time_steps, time_modes, time_hooks)


if __name__ == "__main__":
    main()
