# SPDX-License-Identifier: Apache-2.0
"""A synthetic cost takes its configured time in its configured method.

Step records show it there, whichever method it is.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import psutil
import pytest
from recorder_lab import read_sides, recording
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state

from connectors.synthetic_cost import (
    EVICTED,
    PROCESS,
    SCHEDULER_METHODS,
    THREAD,
    WORKER_METHODS,
    Cost,
    Step,
    SyntheticCostConnector,
)
from kvtax.engine.connector import connector_names, load_connector
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NULL_MODEL
from kvtax.verdict.metrics import CALLS, METRICS
from tests.proc.living import eventually

PROMPT_TOKENS, OUTPUT_TOKENS = 1_024, 12


class CostEngine:
    """A real engine, and both sides of its connector."""

    def __init__(self, model: Path, **cost) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
        self.engine = NullEngine(
            model,
            {
                "kv_connector": "SyntheticCostConnector",
                "kv_connector_module_path": "connectors.synthetic_cost",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "costs": [{"method": "get_finished"} | cost]
                },
            },
        )
        self._prompts = 0
        self.scheduler = self.engine.core.scheduler.connector
        self.worker = get_kv_transfer_group()
        assert isinstance(self.scheduler, SyntheticCostConnector)
        assert isinstance(self.worker, SyntheticCostConnector)

    def set_cost(self, **cost) -> None:
        """Replace the cost on both sides."""
        for side in (self.scheduler, self.worker):
            (before,) = side._costs
            vars(side).pop(before.method, None)
            side._costs = [new] = [Cost(**cost)]
            if new.method != THREAD:
                free = getattr(side, new.method)
                setattr(side, new.method, side._with_cost(free, new))

    def run(self, requests: int) -> list[tuple[Step, float]]:
        """Run one request after the other, from an empty cache.

        Return for each costly call the connector's step and the microseconds.
        """
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        assert self.engine.core.scheduler.reset_prefix_cache()
        spent = []
        spend = SyntheticCostConnector._spend

        def timed(connector: SyntheticCostConnector, cost: Cost) -> None:
            before_ns = time.thread_time_ns()
            spend(connector, cost)
            us = (time.thread_time_ns() - before_ns) / 1e3
            spent.append((connector._step, us))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SyntheticCostConnector, "_spend", timed)
            for _ in range(requests):
                self._prompts += 1
                self.engine.add([self._prompts] * PROMPT_TOKENS, OUTPUT_TOKENS)
                self.engine.run_to_end()
        return spent

    def spent_us(self, method: str, *arguments) -> float:
        """Wall time of one call of a method of the worker's side."""
        before_ns = time.perf_counter_ns()
        getattr(self.worker, method)(*arguments)
        return (time.perf_counter_ns() - before_ns) / 1e3


class CalledMethods:
    """The names of the public methods that are called on the connector meanwhile."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> CalledMethods:
        for name in dir(SyntheticCostConnector):
            does = getattr(SyntheticCostConnector, name)
            if not name.startswith("_") and callable(does) and _takes_self(does):
                self._patch.setattr(
                    SyntheticCostConnector, name, self._noting(name, does)
                )
        return self

    def __exit__(self, *_) -> None:
        self._patch.undo()

    def _noting(self, name: str, does):
        @functools.wraps(does)
        def method(connector, *arguments, **options):
            self.names.add(name)
            return does(connector, *arguments, **options)

        return method


def _takes_self(does) -> bool:
    """False of class methods, which come bound already."""
    return not hasattr(does, "__self__")


PATCHES = ["step_timing_v2", "direct_read_hooks"]

# Methods that an engine calls here. Preemption takes a cache that is too small.
CALLED = [
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "update_connector_output",
    "take_events",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "has_connector_metadata",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]
NOT_CALLED = ["handle_preemptions"]
EACH_LAYER = {"wait_for_layer_load", "has_connector_metadata"}
# The rate of one term, and what 8,000 blocks, 5 requests, 21,000 tokens, 3 s and 2 s
# since a reset make of it.
TERMS = {
    "us": (200, 200),
    "us_per_1k_blocks": (20, 160),
    "us_per_1k_blocks_squared": (2, 128),
    "us_per_running_request": (50, 250),
    "us_per_1k_context_tokens": (10, 210),
    "us_per_s": (30, 90),
    "us_per_s_since_reset": (40, 80),
}
# Once in the life of a server or of a reset.
ONCE = {
    *("bind_gpu_block_pool", "get_finished_count", "get_handshake_metadata"),
    *("register_kv_caches", "reset_cache", "set_host_xfer_buffer_ops"),
    "set_xfer_handshake_metadata",
}
# Only later releases call these, and test_recorder.py shows that they are timed.
LATER = {
    *("bind_kv_cache_manager", "get_mem_pool_context", "get_transfer_results"),
    *("handle_preemptions", "has_pending_push_work", "on_new_request"),
    "set_xfer_handshake_metadata_pp_aware",
}


@pytest.fixture(scope="module")
def engine(model) -> CostEngine:
    return CostEngine(model)


@pytest.fixture(autouse=True)
def free_again(engine) -> Iterator[None]:
    yield
    engine.set_cost(method="get_finished")


def configured_costs() -> Iterator[tuple[list[Cost], str]]:
    """Yield the costs of each config, and its expected verdict."""
    for name in connector_names():
        if not name.startswith("synthetic/"):
            continue
        config = load_connector(name)
        costs = config.kv_transfer_config["kv_connector_extra_config"]["costs"]
        yield msgspec.convert(costs, list[Cost]), config.report.expected


@pytest.mark.parametrize("method", ["build_connector_meta", "get_finished"])
def test_a_method_takes_longer_the_more_is_cached_and_little_after_a_reset(
    method, engine
):
    engine.set_cost(method=method, us_per_1k_blocks=10_000)
    spent = engine.run(requests=4)
    assert len(spent) >= 4
    over_us = [us - 10 * step.cache_blocks for step, us in spent]
    assert min(over_us) >= 0
    assert median(over_us) < 50
    # A call may be in the step that finds nothing cached yet.
    full_us = spent[-1][1]
    assert full_us > 1_500
    assert min(us for _, us in spent) < 800
    assert engine.run(requests=1)[0][1] < full_us / 3


@pytest.mark.parametrize("method", CALLED)
def test_a_cost_is_in_the_records_of_its_method(method, model, tmp_path):
    with recording(tmp_path):
        engine = CostEngine(model, method=method, us=400)
        calls = len(engine.run(requests=2))
    sides = read_sides(tmp_path)[2]
    side = sides["SCHEDULER" if method in SCHEDULER_METHODS else "WORKER"]
    assert any(method in step.connector_self_us for step in side.values())
    # Later releases ask both sides for statistics.
    records = [step for steps in sides.values() for step in steps.values()]
    slow_steps = [step for step in records if method in step.connector_self_us]
    assert sum(step.connector_calls[method] for step in slow_steps) == calls > 0
    for step in slow_steps:
        assert step.connector_self_us[method] >= 400 * step.connector_calls[method]
    others_us = [
        us
        for step in records
        for name, us in step.connector_self_us.items()
        if name != method
    ]
    assert sorted(others_us)[len(others_us) // 2] < 100


@pytest.mark.parametrize("method", NOT_CALLED)
def test_methods_that_this_engine_never_calls_cost_time_when_called(method, engine):
    engine.set_cost(method=method, us=300)
    assert engine.spent_us(method, set()) >= 300


def test_a_cost_in_one_layer_is_in_no_other(engine):
    engine.set_cost(method="save_kv_layer", layer=0, us=300)
    assert engine.spent_us("save_kv_layer", "layers.0.attention", None, None) >= 300
    assert engine.spent_us("save_kv_layer", "layers.10.attention", None, None) < 100


def test_every_third_step_is_every_third_step(engine):
    engine.set_cost(method="get_finished", every=3, us=500)
    steps = engine.run(requests=3)
    costly = [step.number for step, us in steps if us >= 500]
    assert costly == [step.number for step, _ in steps if step.number % 3 == 0]
    assert len(steps) // 3 <= len(costly) <= len(steps) // 3 + 1


def test_prefill_only_is_in_the_steps_with_new_prompts(engine):
    engine.set_cost(method="start_load_kv", prefill_only=True, us=500)
    steps = engine.run(requests=3)
    assert sum(us >= 500 for _, us in steps) == 3
    assert all(step.prefills == (us >= 500) for step, us in steps)


def test_running_requests_and_their_context_are_the_schedulers(engine):
    engine.set_cost(method="get_finished", us=1)
    steps = [step for step, _ in engine.run(requests=3)]
    # One request after the other. The step that follows the last schedules none.
    assert {step.running for step in steps} == {0, 1}
    assert [step.context_tokens for step in steps[:3]] == [
        PROMPT_TOKENS,
        PROMPT_TOKENS + 1,
        PROMPT_TOKENS + 2,
    ]


@pytest.mark.parametrize("term", TERMS)
def test_a_cost_grows_along_its_own_axis_and_no_other(term):
    rate, us = TERMS[term]
    step = Step(7, 8_000, running=5, context_tokens=21_000, since_reset_s=2.0)
    assert Cost("get_finished", **{term: rate}).us_of(step, age_s=3.0) == us


def test_a_cost_may_begin_at_a_level_and_have_a_ceiling():
    cost = Cost("get_finished", us=1_000, from_blocks=6_000)
    assert cost.us_of(Step(cache_blocks=5_999), age_s=0) == 0
    assert cost.us_of(Step(cache_blocks=6_000), age_s=0) == 1_000
    cost = Cost("get_finished", us_per_1k_blocks=80, at_most_us=100)
    assert cost.us_of(Step(cache_blocks=1_000), age_s=0) == 80
    assert cost.us_of(Step(cache_blocks=8_000), age_s=0) == 100
    cost = Cost("get_finished", us=1_000, from_running=12)
    assert cost.us_of(Step(running=11), age_s=0) == 0
    assert cost.us_of(Step(running=12), age_s=0) == 1_000


def test_waiting_needs_no_cpu(engine):
    engine.set_cost(method="wait_for_save", waits=True, us=20_000)
    before_s = time.thread_time()
    assert engine.spent_us("wait_for_save") >= 20_000
    assert time.thread_time() - before_s < 0.005


def test_a_thread_burns_cpu_while_nobody_calls(model):
    engine = CostEngine(model, method="thread", us=2_000)
    before_s = time.process_time()
    while time.process_time() - before_s < 0.1:
        time.sleep(0.01)
    engine.set_cost(method="thread")


def test_a_process_of_its_own_works_the_longer_the_more_is_cached(model):
    engine = CostEngine(model, method=PROCESS, us_per_1k_blocks=100_000)
    (process,) = (
        child
        for child in psutil.Process().children()
        if "synthetic_process.py" in " ".join(child.cmdline())
    )
    engine.run(requests=1)

    def spent_s() -> float:
        return sum(process.cpu_times()[:2])

    before_s = spent_s()
    eventually(lambda: spent_s() > before_s + 0.2)
    process.kill()
    process.wait()


def test_an_object_in_the_place_of_a_method_is_not_timed(model, tmp_path):
    with pytest.MonkeyPatch.context() as patch, recording(tmp_path):
        free = SyntheticCostConnector.get_finished
        patch.setattr(SyntheticCostConnector, "get_finished", free)
        engine = CostEngine(model, is_object=True, us=400)
        assert any(us >= 400 for _, us in engine.run(requests=2))
    _, header, _ = read_sides(tmp_path)
    assert set(header.not_timed) == {"get_finished"}


def test_the_age_begins_anew_at_a_reset(engine):
    engine.set_cost(method="get_finished", us=1)
    engine.run(requests=1)
    time.sleep(0.2)
    steps = [step for step, _ in engine.run(requests=2)]
    assert steps[0].since_reset_s < 0.1 < 0.2 + steps[-1].since_reset_s
    assert steps[-1].since_reset_s > steps[0].since_reset_s


def test_a_misspelt_cost_is_refused_by_name():
    with pytest.raises(msgspec.ValidationError, match="get_finished"):
        msgspec.convert({"method": "get_finised", "us": 1}, Cost)
    with pytest.raises(msgspec.ValidationError, match="us_per_block"):
        msgspec.convert({"method": "get_finished", "us_per_block": 1}, Cost)


# As on the machines on which these configs are measured.
OWN_WORK_US = 600


def test_a_config_must_be_called_growing_if_it_grows_by_more_than_the_margin():
    empty = Step(prefills=True, after_prefills=True, idle_s=1.0, running=32)
    full = dataclasses.replace(empty, cache_blocks=12_500)
    for costs, expected in configured_costs():
        more_us = 0.0
        for cost in costs:
            calls = NULL_MODEL["num_hidden_layers"] if cost.method in EACH_LAYER else 1
            rise_us = cost.us_of(full, age_s=0) - cost.us_of(empty, age_s=0)
            more_us += calls * rise_us
        stalls = any(cost.each_blocks for cost in costs)
        assert stalls == (expected == "stalls"), costs
        # Only a full cache evicts.
        evicts = any(cost.method == EVICTED for cost in costs)
        grows = more_us > METRICS[CALLS].margin * OWN_WORK_US or evicts
        assert (grows and not stalls) == (expected == "grows"), costs
        drifts = any(
            cost.us_per_s or cost.us_per_s_since_reset or cost.kib_per_block
            for cost in costs
        )
        assert drifts == (expected == "drifts"), costs
        is_timed = not any(cost.is_object for cost in costs)
        assert is_timed == (expected != "inconclusive"), costs


def test_every_method_that_an_engine_calls_has_a_config(model):
    with CalledMethods() as called:
        CostEngine(model).run(requests=2)
    assert called.names >= set(CALLED)
    configured = {cost.method for costs, _ in configured_costs() for cost in costs}
    assert configured >= called.names - ONCE - LATER
    assert {*CALLED, *NOT_CALLED} == {*SCHEDULER_METHODS, *WORKER_METHODS}
