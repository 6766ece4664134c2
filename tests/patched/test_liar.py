# SPDX-License-Identifier: Apache-2.0
"""A lying connector burns what it says, where it says, as a function of |cache|."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import msgspec
import pytest
from liar_lab import CALLED, PROMPT_TOKENS, CalledMethods, Liar

from connectors.liar import SCHEDULER_METHODS, WORKER_METHODS, Lie, Step
from lab.paths import CONFIGS
from lab.serving.connector import load_connector
from lab.serving.null_model import NULL_MODEL
from microbench.analysis.verdict import MARGIN_US_PER_1K_BLOCKS

PATCHES = ["direct_read_hooks"]

# Preemption takes a cache that is too small.
NOT_CALLED = ["handle_preemptions"]
EACH_LAYER = {"wait_for_layer_load", "has_connector_metadata"}
# The rate of one term, and what 8,000 blocks, 5 requests, 21,000 tokens and 3 s make
# of it.
TERMS = {
    "us": (200, 200),
    "us_per_1k_blocks": (20, 160),
    "us_per_1k_blocks_squared": (2, 128),
    "us_per_running_request": (50, 250),
    "us_per_1k_context_tokens": (10, 210),
    "us_per_s": (30, 90),
}
# Once in the life of a server or of a reset.
ONCE = {
    "bind_gpu_block_pool",
    "get_finished_count",
    "get_handshake_metadata",
    "register_kv_caches",
    "reset_cache",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
}
# Only later releases call these, and test_recorder.py shows that they are timed.
LATER = {
    "bind_kv_cache_manager",
    "get_mem_pool_context",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_push_work",
    "on_new_request",
    "set_xfer_handshake_metadata_pp_aware",
}


@pytest.fixture(scope="module")
def liar(model) -> Liar:
    return Liar(model)


@pytest.fixture(autouse=True)
def honest_again(liar) -> Iterator[None]:
    yield
    liar.tell(method="get_finished")


def liars() -> Iterator[tuple[Lie, str]]:
    """The lie of each config, and the verdict that it must get."""
    for file in (CONFIGS / "connectors" / "liars").iterdir():
        config = load_connector(f"liars/{file.stem}")
        told = config.kv_transfer_config["kv_connector_extra_config"]
        yield msgspec.convert(told, Lie), config.report.expected


@pytest.mark.parametrize("method", CALLED)
def test_each_method_takes_longer_the_more_is_cached(method, liar):
    liar.tell(method=method, us_per_1k_blocks=10_000)
    spent = liar.run(requests=4)
    assert len(spent) >= 4
    over_us = [us - 10 * step.cache_blocks for step, us in spent]
    assert min(over_us) >= 0
    assert median(over_us) < 50
    # A call may be in the step that finds nothing cached yet.
    assert spent[-1][1] > 1_500
    assert min(us for _, us in spent) < 800


def test_after_a_reset_of_the_prefix_cache_it_costs_little_again(liar):
    liar.tell(method="get_finished", us_per_1k_blocks=10_000)
    full_us = liar.run(requests=4)[-1][1]
    assert liar.run(requests=1)[0][1] < full_us / 3


@pytest.mark.parametrize("method", NOT_CALLED)
def test_methods_that_this_engine_never_calls_lie_when_they_are_called(method, liar):
    liar.tell(method=method, us=300)
    assert liar.spent_us(method, set()) >= 300


def test_a_lie_in_one_layer_is_in_no_other(liar):
    liar.tell(method="save_kv_layer", layer=0, us=300)
    assert liar.spent_us("save_kv_layer", "layers.0.attention", None, None) >= 300
    assert liar.spent_us("save_kv_layer", "layers.10.attention", None, None) < 100


def test_every_third_step_is_every_third_step(liar):
    liar.tell(method="get_finished", every=3, us=500)
    steps = liar.run(requests=3)
    lied = [step.number for step, us in steps if us >= 500]
    assert lied == [step.number for step, _ in steps if step.number % 3 == 0]
    assert len(steps) // 3 <= len(lied) <= len(steps) // 3 + 1


def test_prefill_only_is_in_the_steps_with_new_prompts(liar):
    liar.tell(method="start_load_kv", prefill_only=True, us=500)
    steps = liar.run(requests=3)
    assert sum(us >= 500 for _, us in steps) == 3
    assert all(step.prefills == (us >= 500) for step, us in steps)


def test_running_requests_and_their_context_are_the_schedulers(liar):
    liar.tell(method="get_finished", us=1)
    steps = [step for step, _ in liar.run(requests=3)]
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
    step = Step(7, cache_blocks=8_000, running=5, context_tokens=21_000)
    assert Lie("get_finished", **{term: rate}).us_of(step, age_s=3.0) == us


def test_beyond_half_the_cache_only_the_blocks_beyond_count():
    lie = Lie("get_finished", us_per_1k_blocks=20, beyond_blocks=6_000)
    assert lie.us_of(Step(cache_blocks=6_000), age_s=0) == 0
    assert lie.us_of(Step(cache_blocks=8_000), age_s=0) == 40


def test_waiting_needs_no_cpu(liar):
    liar.tell(method="wait_for_save", waits=True, us=20_000)
    before_s = time.thread_time()
    assert liar.spent_us("wait_for_save") >= 20_000
    assert time.thread_time() - before_s < 0.005


def test_a_thread_burns_cpu_while_nobody_calls(model):
    liar = Liar(model, method="thread", us=2_000)
    before_s = time.process_time()
    time.sleep(0.5)
    # 2 ms in every 5.
    assert time.process_time() - before_s > 0.1
    liar.tell(method="thread")


def test_a_misspelt_lie_is_refused_by_name():
    with pytest.raises(msgspec.ValidationError, match="get_finished"):
        msgspec.convert({"method": "get_finised", "us": 1}, Lie)
    with pytest.raises(msgspec.ValidationError, match="us_per_block"):
        msgspec.convert({"method": "get_finished", "us_per_block": 1}, Lie)


def test_a_config_must_be_called_growing_if_it_grows_by_more_than_the_margin():
    for lie, expected in liars():
        empty, full = Step(prefills=True), Step(cache_blocks=12_500, prefills=True)
        more_us = lie.us_of(full, age_s=0) - lie.us_of(empty, age_s=0)
        calls = NULL_MODEL["num_hidden_layers"] if lie.method in EACH_LAYER else 1
        grows = calls * more_us > MARGIN_US_PER_1K_BLOCKS * 12.5
        assert grows == (expected == "grows"), lie
        assert (lie.us_per_s > 0) == (expected == "drifts"), lie


def test_every_method_that_an_engine_calls_has_a_liar(model):
    with CalledMethods() as called:
        Liar(model).run(requests=2)
    assert called.names >= set(CALLED)
    assert {lie.method for lie, _ in liars()} >= called.names - ONCE - LATER
    assert {*CALLED, *NOT_CALLED} == {*SCHEDULER_METHODS, *WORKER_METHODS}
