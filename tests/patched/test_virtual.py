# SPDX-License-Identifier: Apache-2.0
"""A virtual engine schedules as a real one, in the time of queueing theory."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.records.decisions import DecisionEnd, DecisionsHeader
from kvtax_fleet.records.host_times import RequestTimes
from kvtax_fleet.simulate import run_cells
from kvtax_fleet.simulate.endpoints import VirtualBody, VirtualIndex
from kvtax_fleet.simulate.virtual_instance import VirtualInstance, VirtualRequest
from overlapping import Overlapping
from virtual_lab import (
    BLOCK_SIZE,
    FORWARD_NS,
    MAX_MODEL_LEN,
    Witness,
    drive_real,
    drive_virtual,
    rounds,
    run_virtually,
    virtual_engine,
)
from vllm.distributed.kv_transfer import kv_transfer_state

from kvtax.engine.null_engine import NullEngine
from kvtax.records.files import LineFile

PATCHES = ["step_timing_v2"]
# Virtual time reads its arguments as this release does.
ONLY = "0.18.1"

# Too few for all prompts: blocks are evicted all the time.
BLOCKS = 200


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    stems = [[rng.randrange(1, 1000) for _ in range(1_500)] for _ in range(5)]
    prompts = []
    for _ in range(150):
        stem = rng.choice(stems)[: rng.randrange(1, 1_500)]
        tail = [rng.randrange(1, 1000) for _ in range(rng.randrange(100))]
        prompts.append(stem + tail)
    return prompts


def test_what_is_believed_is_what_the_engine_finds(model):
    engine = virtual_engine(model, BLOCKS, False, events=True)

    async def serve() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        instance = VirtualInstance(engine, loop, RequestTimes())
        index = VirtualIndex({"i": engine}, loop, 16)
        pairs = []
        for prompt in prompts():
            body = VirtualBody(prompt, 3)
            await asyncio.sleep(0.001)
            (believed,) = (await index.cached_tokens(body)).values()
            earlier = instance.totals.cached_tokens
            answer = instance.request(body.raw)
            await answer.begin()
            while await answer.chunk():
                pass
            pairs.append((believed, instance.totals.cached_tokens - earlier))
        return pairs

    pairs = run_virtually(serve())
    assert all(believed == cached for believed, cached in pairs)
    assert sum(cached > 0 for _, cached in pairs) > 50


SEEDS = [1, 2, 3]
ROUNDS = 400
# Too few for all requests: some wait, some are preempted, and blocks are evicted.
FEW_BLOCKS = 700


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_has_the_same_requests_tokens_and_blocks(model, overlapping, seed):
    script = list(rounds(seed, ROUNDS))
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    real = NullEngine(
        model,
        None,
        num_blocks=FEW_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        executor=Overlapping if overlapping else None,
    )
    virtual = virtual_engine(model, FEW_BLOCKS, overlapping)
    seen_really, seen = Witness(real.core), Witness(virtual.core)
    answers_really = drive_real(real, script)
    answers = drive_virtual(virtual, script)
    for number, (ours, theirs) in enumerate(
        zip(seen.seen, seen_really.seen, strict=True)
    ):
        differ = [key for key in theirs if ours[key] != theirs[key]]
        assert not differ, (number, [(ours[key], theirs[key]) for key in differ])
    assert answers == answers_really
    assert seen.preemptions > 0
    assert any(len(step["scheduled"]) > 8 for step in seen.seen)


REQUESTS = 4_000


def poisson_ns(utilisation: float) -> list[int]:
    """When requests come that take a forward each."""
    rng, now_ns, arrivals_ns = random.Random(1), 0.0, []
    for _ in range(REQUESTS):
        now_ns += rng.expovariate(utilisation / FORWARD_NS)
        arrivals_ns.append(round(now_ns))
    return arrivals_ns


def answered_ns(model, arrivals_ns: list[int], at_once: int) -> list[int]:
    """When each is answered by an instance that serves so many `at_once`."""
    engine = virtual_engine(model, FEW_BLOCKS, False, max_requests=at_once)

    async def serve() -> list[int]:
        loop = asyncio.get_running_loop()
        instance = VirtualInstance(engine, loop, RequestTimes())

        async def serve_at(number: int, due_ns: int) -> int:
            await loop.sleep_until(due_ns)
            prompt = [number // 1_000 + 1, number % 1_000 + 1] * 4
            await instance.request(VirtualRequest(prompt, output_tokens=1)).begin()
            return loop.now_ns()

        return await asyncio.gather(
            *(serve_at(number, due_ns) for number, due_ns in enumerate(arrivals_ns))
        )

    return run_virtually(serve())


def test_one_at_a_time_is_m_d_1(model):
    """Each wait by Lindley's recursion, which all of queueing theory rests on."""
    arrivals_ns = poisson_ns(utilisation=0.7)
    waits_ns = [0]
    for one_ns, next_ns in pairwise(arrivals_ns):
        waits_ns.append(max(0, waits_ns[-1] + FORWARD_NS - (next_ns - one_ns)))
    answered = answered_ns(model, arrivals_ns, at_once=1)
    assert answered == [
        arrival_ns + wait_ns + FORWARD_NS
        for arrival_ns, wait_ns in zip(arrivals_ns, waits_ns, strict=True)
    ]


def test_several_at_a_time_are_served_in_batches(model):
    """Who has come when a forward begins is in it, up to as many as there is room."""
    at_once = 4
    arrivals_ns = poisson_ns(utilisation=0.8 * at_once)
    expected, free_ns = [], 0
    while len(expected) < REQUESTS:
        begins_ns = max(free_ns, arrivals_ns[len(expected)])
        waiting = sum(
            arrival_ns <= begins_ns
            for arrival_ns in arrivals_ns[len(expected) :][:at_once]
        )
        free_ns = begins_ns + FORWARD_NS
        expected += [free_ns] * waiting
    assert answered_ns(model, arrivals_ns, at_once) == expected


TOKENS = 20


def token_times_ns(engine) -> list[int]:
    """When each of the tokens of one request is there."""
    engine.add("0", [1] * 100, TOKENS, None)
    ended_ns = []
    while engine.has_work:
        if outputs := engine.step():
            ended_ns += [engine.clock.now_ns] * len(outputs.outputs)
    return ended_ns


# Whether it schedules ahead, and the host's time, the first token's and the time
# between tokens, in forwards.
HOSTS = {
    "in no time": (False, 0, 1, 1),
    "in no time, ahead": (True, 0, 1, 1),
    "added to every step": (False, 0.5, 1.5, 1.5),
    "hidden behind the step before": (True, 0.5, 1.5, 1),
    "slower than the device": (True, 2, 4, 2),
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_delays_steps_by_what_it_cannot_hide(model, host):
    ahead, took, *expected = HOSTS[host]
    scheduler_us = {"base_us": took * FORWARD_NS / 1e3} if took else {}
    times_ns = token_times_ns(virtual_engine(model, FEW_BLOCKS, ahead, **scheduler_us))
    first_ns, step_ns = (forwards * FORWARD_NS for forwards in expected)
    assert times_ns == [first_ns + step_ns * step for step in range(TOKENS)]


def test_a_walk_costs_its_slope_times_the_cache_in_every_step(model):
    slope_us = 60.0
    plain = virtual_engine(model, FEW_BLOCKS, False)
    walk = virtual_engine(model, FEW_BLOCKS, False, us_per_1k_cached_blocks=slope_us)
    seen = Witness(walk.core)
    took_ns = [engine_ns[-1] for engine_ns in map(token_times_ns, (plain, walk))]
    cached = [step["cached"] for step in seen.seen][:TOKENS]
    assert cached[-1] > cached[0] > 0
    assert took_ns[1] - took_ns[0] == sum(round(slope_us * blocks) for blocks in cached)


def test_a_blocks_hash_depends_on_its_tokens_and_all_before_it_alone(model):
    """So prefixes are found in the cache as by vLLM's own hashes."""
    engine = virtual_engine(model, 700, overlapping=False)
    prompt = list(range(1, 100))
    hashes = engine.block_hashes(prompt)
    assert len(hashes) == len(set(hashes)) == len(prompt) // BLOCK_SIZE
    assert engine.block_hashes([*prompt, 7]) == hashes
    for place in (0, 40, 90):
        other = engine.block_hashes([*prompt[:place], 500, *prompt[place + 1 :]])
        same = place // BLOCK_SIZE
        assert other[:same] == hashes[:same]
        assert not set(other[same:]) & set(hashes)
    # What is generated goes on from the prompt's hashes.
    request = engine._request("r", prompt, 40, None)
    request.append_output_token_ids([9] * 30)
    whole = engine._request("w", prompt + [9] * 30, 1, None)
    assert request.block_hashes == whole.block_hashes


def test_records_reach_the_disk_while_a_run_goes_on(tmp_path):
    header = DecisionsHeader(policy="linear")
    ended = DecisionEnd("a", 1, "s", "ok")

    async def half_a_minute() -> list[int]:
        with (
            LineFile(tmp_path / "replay.jsonl", header) as records,
            DecisionLog(tmp_path / "decisions.jsonl", header) as decisions,
        ):
            flushes = asyncio.create_task(run_cells._flush(records, decisions))
            for _ in range(2):
                records.append(ended)
                decisions.ended(ended)
                await asyncio.sleep(run_cells.FLUSH_EVERY_S + 1)
            lines = [len(p.read_bytes().splitlines()) for p in tmp_path.iterdir()]
            assert not flushes.done()
            flushes.cancel()
            return lines

    assert run_virtually(half_a_minute()) == [3, 3]
