# SPDX-License-Identifier: Apache-2.0
"""The step records against what a real engine core was asked to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorder_lab import new_engine, recording

from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine, cached_tokens
from kvtax.engine.null_model import NOOP
from kvtax.records.steps import only_life
from tests.releases import INSTALLED

PATCHES = ["step_timing_v2"]
NUM_BLOCKS = 2_000
ENGINE_FIELDS = {
    *("step_id", "t_ns", "schedule_us", "build_meta_us", "step_us", "update_us"),
    *("running", "waiting", "scheduled", "prefill_tokens", "decode_tokens"),
    *("cache_size", "free_blocks", "schedule_cpu_us", "update_cpu_us"),
}
# The first has no step before it, most have no preemption, and the no-op connector's
# calls are in fields of their own, but for those of requests.
SOMETIMES = {"thread_cpu_us", "preemptions", "connector_calls", "connector_self_us"}
# The no-op connector's methods in the worker are constant, or vLLM's own.
WORKER_FIELDS = {"step_id", "t_ns", "execute_model_us"}
FILES = ["engine_request", "engine_step", "request_ids", "threads", "worker_step.r0"]


class Workload:
    """Requests in phases, each with its first step, its end and its cached tokens.

    No two prompts share a block.
    """

    def __init__(self, engine: NullEngine) -> None:
        self.engine, self.scheduler = engine, engine.core.scheduler
        self.phases: dict[str, SimpleNamespace] = {}
        self._random = random.Random(7)
        self._steps = self._first = 0
        self._cached_tokens: dict[str, int] = {}

    def add(self, prompt_tokens: int, output_tokens: int) -> list[int]:
        prompt = [self._random.randrange(1, 1_024) for _ in range(prompt_tokens)]
        self.engine.add(prompt, output_tokens)
        return prompt

    def step(self) -> None:
        outputs, _ = self.engine.core.step()
        self._steps += 1
        for output in outputs[0].outputs if outputs else ():
            if cached := cached_tokens(output):
                self._cached_tokens[output.request_id] = cached[0]

    def end(self, phase: str, **facts) -> None:
        while self.scheduler.has_requests():
            self.step()
        facts |= {"steps": slice(self._first, self._steps)}
        facts |= {"cached_tokens": sum(self._cached_tokens.values())}
        self.phases[phase] = SimpleNamespace(**facts)
        self._first, self._cached_tokens = self._steps, {}

    def run(self) -> None:
        """Arrivals, chunked prefills, cache hits, a reset and preemptions."""
        first = self.add(50, 100)
        self.end("single")

        chooser = random.Random(3)
        # Together more than a step's budget of tokens, so that prefills are chunked.
        sizes = [(4_000, 20), (5_001, 30), (300, 1), (17, 40), (1, 5)]
        sizes += [(chooser.randint(2, 400), chooser.randint(1, 60)) for _ in range(20)]
        for size in sizes:
            self.add(*size)
            for _ in range(chooser.randint(0, 3)):
                if self.scheduler.has_requests():
                    self.step()
        self.engine.add(first, 10)
        # The blocks of the repeated prompt are there already.
        blocks = sum(full_blocks(*size) for size in [(50, 100), *sizes])
        self.end("mixed", sizes=[*sizes, (50, 10)], blocks=blocks)

        # The second prompt's last chunk is one token: 4,096 + 4,097 = budget + 1.
        sizes = [(4_096, 4), (4_097, 4)]
        for size in sizes:
            self.add(*size)
        self.end("one_token_chunk", sizes=sizes)

        assert self.scheduler.reset_prefix_cache()
        self.add(BLOCK_SIZE - 2, 2)
        self.end("after_reset")

        preempted, preempt = [], self.scheduler._preempt_request

        def counted_preempt(request, *rest, **options):
            preempted.append(request.request_id)
            return preempt(request, *rest, **options)

        self.scheduler._preempt_request = counted_preempt
        for _ in range(50):
            self.add(600, 80)
        self.end("preempting", preempted=preempted)


def full_blocks(prompt_tokens: int, output_tokens: int) -> int:
    """Blocks a request fills; its last token is sampled but never computed."""
    return (prompt_tokens + output_tokens - 1) // BLOCK_SIZE


@pytest.fixture(scope="session")
def recorded(model, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch, recording(folder):
        patch.setenv("KVTAX_STEP_RECORDS_LABEL", '{"test": 1}')
        workload = Workload(new_engine(NOOP, model, NUM_BLOCKS))
        workload.run()
    life = only_life(folder)
    headers, steps = zip(
        *(
            records(life / f"{name}.jsonl")
            for name in ("engine_step", "worker_step.r0")
        ),
        strict=True,
    )
    return SimpleNamespace(
        life=life,
        headers=headers,
        engine=steps[0],
        worker=steps[1],
        phases=workload.phases,
    )


def records(path: Path) -> tuple[dict, list[dict]]:
    """Header and records of a file of whole lines."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    header, *lines = map(json.loads, text.splitlines())
    return header, lines


def total(steps: list[dict], field: str) -> int:
    return sum(step.get(field, 0) for step in steps)


def test_header_says_what_the_file_is(recorded):
    assert sorted(path.stem for path in recorded.life.iterdir()) == FILES
    for name, header in zip(("engine", "worker"), recorded.headers, strict=True):
        assert header["life"] == recorded.life.name
        assert header["schema"] == f"kvtax.{name}_step/1"
        assert header["clock"] == "CLOCK_MONOTONIC"
        assert header["vllm_version"].startswith(INSTALLED)
        assert header["label"] == {"test": 1}
        assert header["lost"] == 0
        assert set(header["wrapper_us"]) == {"inside", "timed", "counted"}
    constant = {"start_load_kv", "wait_for_save", "save_kv_layer"}
    assert constant <= set(recorded.headers[1]["constant"])
    assert "get_finished" not in recorded.headers[1]["methods"]


def test_every_engine_step_has_one_engine_and_one_worker_record(recorded):
    count = recorded.phases["preempting"].steps.stop
    # The worker's last one too, which no next step ends.
    for steps in (recorded.engine, recorded.worker):
        assert [step["step_id"] for step in steps] == list(range(count))
    for engine, worker in zip(recorded.engine, recorded.worker, strict=True):
        assert ENGINE_FIELDS <= set(engine) <= ENGINE_FIELDS | SOMETIMES
        assert ("thread_cpu_us" in engine) == (engine["step_id"] > 0)
        assert set(worker) == WORKER_FIELDS


@pytest.mark.parametrize("name", ["mixed", "one_token_chunk"])
def test_tokens_reconcile_with_what_the_requests_had(recorded, name):
    """A last prompt chunk of one token counts as a decode."""
    phase = recorded.phases[name]
    steps, as_decode = recorded.engine[phase.steps], int(name == "one_token_chunk")
    # Three blocks of the repeated prompt.
    assert phase.cached_tokens == (0 if as_decode else 48)
    prompt = sum(prompt for prompt, _ in phase.sizes) - phase.cached_tokens
    assert total(steps, "prefill_tokens") == prompt - as_decode
    # A request's first token comes with its prefill.
    decoded = sum(output - 1 for _, output in phase.sizes)
    assert total(steps, "decode_tokens") == decoded + as_decode
    assert total(steps, "preemptions") == 0


def test_cache_size_follows_the_block_arithmetic(recorded):
    sizes = {
        name: [step["cache_size"] for step in recorded.engine[phase.steps]]
        for name, phase in recorded.phases.items()
    }
    # Step k computes the prompt and k more tokens; the last step only cleans up.
    computed = [50 + k for k in range(100)] + [50 + 100 - 1]
    assert sizes["single"] == [tokens // BLOCK_SIZE for tokens in computed]
    assert sizes["mixed"] == sorted(sizes["mixed"])
    assert sizes["mixed"][-1] == recorded.phases["mixed"].blocks
    assert sizes["one_token_chunk"][-1] > 1_000
    assert set(sizes["after_reset"]) == {0}


def test_preemptions_are_counted_and_blocks_run_out(recorded):
    phase = recorded.phases["preempting"]
    steps = recorded.engine[phase.steps]
    assert total(steps, "preemptions") == len(phase.preempted) > 0
    assert min(step["free_blocks"] for step in steps) < 50
    assert max(step["waiting"] for step in steps) > 0
    assert all(step["scheduled"] <= step["running"] for step in steps)


def test_parts_of_a_step_fit_into_it(recorded):
    for engine, worker in zip(recorded.engine, recorded.worker, strict=True):
        assert 0 < engine["build_meta_us"] <= engine["schedule_us"]
        assert engine["update_us"] > 0
        parts = engine["schedule_us"] + worker["execute_model_us"] + engine["update_us"]
        assert parts <= engine["step_us"]
        end_ns = engine["t_ns"] + 1e3 * engine["step_us"]
        assert engine["t_ns"] < worker["t_ns"] < end_ns
