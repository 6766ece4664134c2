# SPDX-License-Identifier: Apache-2.0
"""Runs a real engine core on the null model and notes what it was asked to do.

Started by test_step_timing.py on a patched tree. The script knows what the records must
say without asking the recorder.
"""

import inspect
import json
import os
import random
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine, cached_tokens
from kvtax.engine.null_model import NOOP

NUM_BLOCKS = 2_000


class Prompts:
    """Prompts that share no block with any other, from one seed."""

    def __init__(self):
        self._random = random.Random(7)

    def take(self, tokens: int) -> list[int]:
        return [self._random.randrange(1, 1_024) for _ in range(tokens)]


def full_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Blocks a request fills; its last token is sampled but never computed."""
    return (prompt_tokens + output_tokens - 1) // BLOCK_SIZE


class Account:
    """Steps the engine, and adds up its input and its output."""

    def __init__(self, engine: NullEngine):
        self.engine = engine
        self.steps = 0
        self._first = 0
        self._cached_tokens: dict[str, int] = {}

    def step(self) -> None:
        outputs, _ = self.engine.core.step()
        self.steps += 1
        for output in outputs[0].outputs if outputs else ():
            if cached := cached_tokens(output):
                self._cached_tokens[output.request_id] = cached[0]

    def drain(self) -> None:
        while self.engine.core.scheduler.has_requests():
            self.step()

    def phase(self, **facts) -> dict:
        """Facts of the steps since the last call, with the number of the first."""
        facts |= {
            "first": self._first,
            "end": self.steps,
            "cached_tokens": sum(self._cached_tokens.values()),
        }
        self._first, self._cached_tokens = self.steps, {}
        return facts


def workload(engine: NullEngine) -> dict:
    """Arrivals, chunked prefills, cache hits, a reset and preemptions."""
    prompts, account, phases = Prompts(), Account(engine), {}
    scheduler = engine.core.scheduler

    prompt = prompts.take(50)
    engine.add(prompt, 100)
    account.drain()
    phases["single"] = account.phase(prompt=50, output=100)

    chooser = random.Random(3)
    # Together more than a step's budget of tokens, so that prefills are chunked.
    sizes = [(4_000, 20), (5_001, 30), (300, 1), (17, 40), (1, 5)]
    sizes += [(chooser.randint(2, 400), chooser.randint(1, 60)) for _ in range(20)]
    for prompt_tokens, output_tokens in sizes:
        engine.add(prompts.take(prompt_tokens), output_tokens)
        for _ in range(chooser.randint(0, 3)):
            if scheduler.has_requests():
                account.step()
    engine.add(prompt, 10)
    account.drain()
    phases["mixed"] = account.phase(
        prompt=sum(p for p, _ in sizes) + len(prompt),
        outputs=[output for _, output in sizes] + [10],
        # The repeated prompt's blocks were there already.
        blocks=full_blocks(50, 100) + sum(full_blocks(*size) for size in sizes),
    )

    # The second prompt's last chunk is one token: 4,096 + 4,097 = budget + 1.
    engine.add(prompts.take(4_096), 4)
    engine.add(prompts.take(4_097), 4)
    account.drain()
    phases["one_token_chunk"] = account.phase(prompt=8_193, outputs=[4, 4])

    assert scheduler.reset_prefix_cache()
    engine.add(prompts.take(BLOCK_SIZE - 2), 2)
    account.drain()
    phases["after_reset"] = account.phase()

    preempted = []
    preempt = scheduler._preempt_request

    def counted_preempt(request, *rest, **options):
        preempted.append(request.request_id)
        return preempt(request, *rest, **options)

    scheduler._preempt_request = counted_preempt
    for _ in range(50):
        engine.add(prompts.take(600), 80)
    account.drain()
    scheduler._preempt_request = preempt
    phases["preempting"] = account.phase(preemptions=len(preempted))
    return phases


def record_to(engine: NullEngine, directory: Path) -> None:
    """Record this engine into `directory` from here on."""
    from vllm.kvtax_probe.engine import EngineRecorder
    from vllm.kvtax_probe.worker import WorkerRecorder

    os.environ["KVTAX_STEP_RECORDS_DIR"] = str(directory)
    core, worker = engine.core, engine.core.model_executor.driver_worker
    core._kvtax_recorder.close()
    core._kvtax_recorder.detach()
    worker._kvtax_recorder.close()
    core._kvtax_recorder = EngineRecorder(core)
    worker._kvtax_recorder = WorkerRecorder(worker)


def idle_steps_wait_for_saves() -> bool:
    """Whether vLLM waits for saves in a step that computes nothing: later ones do."""
    from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

    step = mixin.KVConnectorModelRunnerMixin._get_kv_connector_output
    return "wait_for_save" not in inspect.signature(step).parameters


class SlowExecutor:
    """The real executor behind a thread that takes a while, as a GPU would.

    It notes (step_id, start and end of the execution in ns).
    """

    def __init__(self, executor):
        self._executor = executor
        self._thread = ThreadPoolExecutor(1)
        self.runs = []

    def execute_model(self, scheduler_output, non_block):
        return self._thread.submit(self._execute, scheduler_output)

    def _execute(self, scheduler_output):
        time.sleep(0.002)
        start = time.perf_counter_ns()
        output = self._executor.execute_model(scheduler_output)
        end = time.perf_counter_ns()
        self.runs.append((scheduler_output.step_id, start, end))
        return output

    def sample_tokens(self, grammar_output, non_block):
        return self._thread.submit(self._executor.sample_tokens, grammar_output)


def batch_queue(engine: NullEngine, directory: Path) -> dict:
    """Two steps in flight: N + 1 is scheduled before N is updated."""
    record_to(engine, directory)
    core, scheduler = engine.core, engine.core.scheduler
    events = []
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def noted_schedule(*told):
        output = schedule(*told)
        tokens = output.num_scheduled_tokens
        events.append(("schedule", output.step_id, sum(tokens.values()), len(tokens)))
        return output

    def noted_update(scheduler_output, model_output):
        result = update(scheduler_output, model_output)
        events.append(("update", scheduler_output.step_id, time.perf_counter_ns(), 0))
        return result

    executor, core.model_executor = (
        core.model_executor,
        SlowExecutor(core.model_executor),
    )
    scheduler.schedule, scheduler.update_from_output = noted_schedule, noted_update
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    # A request cannot be scheduled again before its token is known, so two groups
    # of requests take turns.
    prompts = Prompts()
    for _ in range(2):
        engine.add(prompts.take(100), 40)
        core.step_with_batch_queue()
    while scheduler.has_requests() or core.batch_queue:
        core.step_with_batch_queue()
    runs = core.model_executor.runs
    core.model_executor, core.batch_queue = executor, None
    scheduler.schedule, scheduler.update_from_output = schedule, update
    return {"events": events, "runs": runs}


def main() -> None:
    model, result, scenario, *rest = sys.argv[1:]
    engine = NullEngine(Path(model), NOOP, NUM_BLOCKS)
    if scenario == "all":
        (place,) = map(Path, rest)
        found = {
            "phases": workload(engine),
            "idle_steps_wait_for_saves": idle_steps_wait_for_saves(),
            "batch_queue": batch_queue(engine, place / "queue"),
        }
        Path(result).write_text(json.dumps(found))
    while scenario == "until_killed":
        engine.add([5] * 40, 30)
        engine.run_to_end()


if __name__ == "__main__":
    main()
