# SPDX-License-Identifier: Apache-2.0
"""Scores of other routers are those of their sources, on 20,000 random states each.

Here each formula stands as its source has it, in blocks:

- Dynamo: ai-dynamo/dynamo at 07a6c9ce, `worker_logit` of
  lib/kv-router/src/scheduling/selector/default.rs; pull request 11028's product of the
  same two terms;
- llm-d: llm-d-router at ebab687, its three default scorers, each in [0, 1], and
  `max-score-picker`; pull request 2351's product.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.policies.decision import RequestInfo
from kvtax_fleet.records.decisions import Candidate, Snapshot

BLOCK = 16
STATES = 20_000
AGENTIC = {"overlap_credit": 2, "decode_request_weight": 64, "prefill_scale": 4}

Costs = Callable[[RequestInfo, list[Candidate]], list[float]]


def dynamo(
    credit: float = 1, decay: float = 0, weight: float = 0, scale: float = 1
) -> Costs:
    def costs(request: RequestInfo, workers: list[Candidate]) -> list[float]:
        least_active = min(worker.pending_prefill_tokens for worker in workers)
        request_blocks = -(-request.prompt_tokens // BLOCK)

        def logit(worker: Candidate) -> float:
            active = worker.pending_prefill_tokens
            excess_blocks = (active - least_active) / BLOCK
            credited = credit / (1 + decay * (excess_blocks / request_blocks))
            raw_prefill_blocks = (active + request.prompt_tokens) / BLOCK
            overlap_blocks = worker.cached_tokens / BLOCK
            adjusted = max(raw_prefill_blocks - credited * overlap_blocks, 0)
            decode_blocks = (worker.ongoing_tokens + request.prompt_tokens) / BLOCK
            return scale * adjusted + decode_blocks + weight * worker.requests

        return [logit(worker) for worker in workers]

    return costs


def dynamo_product(request: RequestInfo, workers: list[Candidate]) -> list[float]:
    def logit(worker: Candidate) -> float:
        uncached = request.prompt_tokens - worker.cached_tokens
        prefill_blocks = (worker.pending_prefill_tokens + uncached) / BLOCK
        decode_blocks = (worker.ongoing_tokens + request.prompt_tokens) / BLOCK
        return prefill_blocks * (decode_blocks + 1)

    return [logit(worker) for worker in workers]


def llm_d(request: RequestInfo, endpoints: list[Candidate]) -> list[float]:
    queues = [endpoint.waiting or 0 for endpoint in endpoints]
    low, high = min(queues), max(queues)

    def score(endpoint: Candidate, queue: int) -> float:
        queue_score = 1.0 if high == low else (high - queue) / (high - low)
        kv_score = 1 - (endpoint.kv_used or 0)
        matched = endpoint.cached_tokens // BLOCK
        prefix_score = matched / max(1, request.prompt_tokens // BLOCK)
        return 2 * queue_score + 2 * kv_score + 3 * prefix_score

    return [-score(*pair) for pair in zip(endpoints, queues, strict=True)]


def llm_d_product(request: RequestInfo, endpoints: list[Candidate]) -> list[float]:
    blocks = -(-request.prompt_tokens // BLOCK)
    return [
        (blocks - endpoint.cached_tokens // BLOCK) * (endpoint.requests + 1)
        for endpoint in endpoints
    ]


RULES: dict[str, tuple[str, dict[str, float], Costs]] = {
    "dynamo": ("dynamo", {}, dynamo()),
    "dynamo scaled": ("dynamo", {"prefill_scale": 8}, dynamo(scale=8)),
    "dynamo agentic": ("dynamo", AGENTIC, dynamo(credit=2, weight=64, scale=4)),
    "dynamo decaying": ("dynamo", {"overlap_credit_decay": 0.5}, dynamo(decay=0.5)),
    "dynamo's product": ("lmetric_dynamo", {}, dynamo_product),
    "llm-d": ("llm_d", {}, llm_d),
    "llm-d's product": ("lmetric_llm_d", {}, llm_d_product),
}


def states() -> Iterator[tuple[RequestInfo, Snapshot]]:
    """Draw states of eight instances: idle and busy, with sessions and without."""
    draw = random.Random(1)
    for number in range(STATES):
        busy, cached = draw.random() < 0.5, draw.random() < 0.5
        prompt = draw.choice([1_000, 6_000, 12_008, 20_000, 34_007, 60_000])
        workers = [
            _worker(draw, f"i{index}", busy, cached, prompt) for index in range(8)
        ]
        yield RequestInfo("s", prompt), Snapshot(workers, None, number, 0)


def _worker(
    draw: random.Random, name: str, busy: bool, cached: bool, prompt: int
) -> Candidate:
    requests = draw.randint(0, 10) if busy else draw.choice([0, 0, 1, 2])
    tokens = sum(draw.choice([2_000, 8_000, 40_003]) for _ in range(requests))
    pending = sum(draw.choice([0, 0, 800, 5_001]) for _ in range(requests))
    share = draw.choice([0, 0, 0.1, 0.98]) if cached else 0
    return Candidate(
        name,
        "both",
        requests,
        tokens,
        min(pending, tokens),
        int(share * prompt) // BLOCK * BLOCK,
        281_888,
        draw.choice([0, 0, 1, 3]),
        min(0.99, tokens / 281_888),
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_an_instance_of_the_sources_lowest_cost_is_chosen(rule):
    policy, given, costs = RULES[rule]
    parameters = parameters_of(policy, given)
    for request, snapshot in states():
        chosen = POLICIES[policy].decide(request, snapshot, parameters).instance
        workers = snapshot.candidates
        by_name = dict(
            zip([each.name for each in workers], costs(request, workers), strict=True)
        )
        lowest = min(by_name.values())
        assert by_name[chosen] - lowest <= 1e-12 * abs(lowest)


@pytest.mark.parametrize("policy", ["dynamo", "llm_d"])
def test_equal_scores_are_drawn_from_evenly_and_the_same_again(policy):
    """Of idle instances each is taken about as often, by the number of requests."""
    idle = [Candidate(f"i{index}", "both", 0, 0, 0, 0) for index in range(4)]
    taken = dict.fromkeys((each.name for each in idle), 0)
    for number in range(400):
        snapshot = Snapshot(idle, None, number, 0)
        decisions = [
            POLICIES[policy].decide(
                RequestInfo("s", 5_000), each, parameters_of(policy, {})
            )
            for each in (snapshot, msgspec.structs.replace(snapshot))
        ]
        assert decisions[0] == decisions[1]
        taken[decisions[0].instance] += 1
    assert min(taken.values()) > 60
