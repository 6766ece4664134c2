# SPDX-License-Identifier: Apache-2.0
"""Policies that place a request on one instance, which prefills and decodes."""

from __future__ import annotations

from collections.abc import Callable

from kvtax_fleet.policies.decision import (
    Decision,
    Parameters,
    Policy,
    RequestInfo,
    drawn,
    least,
    new_tokens,
    placed,
    serving,
)
from kvtax_fleet.records.decisions import Candidate, Snapshot

BLOCK_TOKENS = 16


def decide_round_robin(
    request: RequestInfo, snapshot: Snapshot, parameters: Parameters
) -> Decision:
    """Choose each instance in turn, whatever it holds and however loaded it is.

    score = how many turns the instance still has to wait; arrivals modulo their number.
    """
    candidates = serving(snapshot)
    count = len(candidates)
    turn = snapshot.arrivals % count
    scores = [float((index - turn) % count) for index in range(count)]
    return placed(candidates, scores, turn, "next in turn")


def decide_load_only(
    request: RequestInfo, snapshot: Snapshot, parameters: Parameters
) -> Decision:
    """Choose the least loaded instance, blind to what is cached where.

    score = ongoing tokens (prompt and generated, of the requests in flight).
    """
    candidates = serving(snapshot)
    scores = [float(candidate.ongoing_tokens) for candidate in candidates]
    return least(candidates, scores, snapshot, "least load")


Score = Callable[[RequestInfo, Candidate], float]


def _prefill_tokens(request: RequestInfo, candidate: Candidate) -> int:
    """Return the tokens to prefill there before the request has its first token."""
    return candidate.pending_prefill_tokens + new_tokens(request, candidate)


def _new_blocks(request: RequestInfo, candidate: Candidate) -> int:
    blocks = -(-request.prompt_tokens // BLOCK_TOKENS)
    return max(0, blocks - candidate.cached_tokens // BLOCK_TOKENS)


# Scores without affinity, override or parameter; of equal ones `lowest` decides.
SCORES: dict[str, Score] = {
    # LMetric (arXiv:2603.15202), work before the first token times batch, with this
    # request in the batch: an idle instance that has more cached is better.
    "lmetric": lambda request, candidate: (
        _prefill_tokens(request, candidate) * (candidate.requests + 1)
    ),
    # As proposed to llm-d (llm-d-router pull request 2351): in blocks, no queue.
    "lmetric_llm_d": lambda request, candidate: (
        _new_blocks(request, candidate) * (candidate.requests + 1)
    ),
    # As proposed to Dynamo (ai-dynamo/dynamo pull request 11028): blocks in flight, the
    # request's own included, for requests. In tokens, so that nothing is rounded.
    "lmetric_dynamo": lambda request, candidate: (
        _prefill_tokens(request, candidate)
        * (candidate.ongoing_tokens + request.prompt_tokens + BLOCK_TOKENS)
    ),
    # The reference study's last policy.
    "lpwl": _prefill_tokens,
}


def _lowest_score(score: Score) -> Policy:
    def decide(
        request: RequestInfo, snapshot: Snapshot, parameters: Parameters
    ) -> Decision:
        candidates = serving(snapshot)
        scores = [float(score(request, candidate)) for candidate in candidates]
        return least(candidates, scores, snapshot, "lowest score")

    return Policy(decide, Parameters)


def decide_lmetric_study(
    request: RequestInfo, snapshot: Snapshot, parameters: Parameters
) -> Decision:
    """Choose by LMetric as the reference study has it: the first of the lowest scores.

    score = (pending prefill tokens + the request's new tokens) * requests. All idle
    instances score 0, whatever they have cached.
    """
    candidates = serving(snapshot)
    scores = [
        float(_prefill_tokens(request, candidate) * candidate.requests)
        for candidate in candidates
    ]
    return placed(candidates, scores, scores.index(min(scores)), "lowest score")


class UnifiedParameters(Parameters, frozen=True):
    """`match_share`: share of the prompt."""

    match_share: float = 0.5


def decide_unified(
    request: RequestInfo, snapshot: Snapshot, parameters: UnifiedParameters
) -> Decision:
    """Choose the longest cached prefix if it is long, else by the study's LMetric.

    A prefix is long above `match_share` of the prompt. The reference study's hybrid
    (its policy `unified`); of equal scores `lowest` decides.
    """
    candidates = serving(snapshot)
    cached = max(candidate.cached_tokens for candidate in candidates)
    if cached > parameters.match_share * request.prompt_tokens:
        reason = "longest cached prefix"
        scores = [-float(candidate.cached_tokens) for candidate in candidates]
    else:
        reason = "little is cached: lowest score"
        scores = [
            float(_prefill_tokens(request, candidate) * candidate.requests)
            for candidate in candidates
        ]
    return least(candidates, scores, snapshot, reason)


class DynamoParameters(Parameters, frozen=True):
    """Dynamo's four weights, with its defaults.

    `overlap_credit`: tokens that one cached token saves; `overlap_credit_decay`: by how
    much prefill above the least of all instances lowers that; `decode_request_weight`:
    blocks that a request in flight is worth; `prefill_scale`: ongoing tokens that one
    token to prefill is worth.
    """

    overlap_credit: float = 1.0
    overlap_credit_decay: float = 0.0
    decode_request_weight: float = 0.0
    prefill_scale: float = 1.0


def decide_dynamo(
    request: RequestInfo, snapshot: Snapshot, parameters: DynamoParameters
) -> Decision:
    """Choose by the tokens to prefill before ours are done, plus the ongoing tokens.

    score = prefill_scale * max(0, pending prefill tokens + prompt tokens - credit *
    cached tokens) + ongoing tokens + prompt tokens + decode_request_weight * 16 *
    requests; credit = overlap_credit / (1 + overlap_credit_decay * excess), excess =
    pending prefill tokens above the least of all candidates, in prompts of this size.

    The KV router of ai-dynamo/dynamo at 07a6c9ce (`worker_logit`) scores so, in blocks,
    and draws among equal scores. It counts a block that several requests in flight
    share once; here each has its own.
    """
    candidates = serving(snapshot)
    least_pending = min(candidate.pending_prefill_tokens for candidate in candidates)
    request_tokens = -(-request.prompt_tokens // BLOCK_TOKENS) * BLOCK_TOKENS

    def score(candidate: Candidate) -> float:
        pending = candidate.pending_prefill_tokens
        excess = (pending - least_pending) / max(1, request_tokens)
        credit = parameters.overlap_credit / (
            1 + parameters.overlap_credit_decay * excess
        )
        cached = credit * min(candidate.cached_tokens, request.prompt_tokens)
        prefill = max(0.0, pending + request.prompt_tokens - cached)
        in_flight = candidate.ongoing_tokens + request.prompt_tokens
        of_requests = parameters.decode_request_weight * candidate.requests
        return (
            parameters.prefill_scale * prefill + in_flight + of_requests * BLOCK_TOKENS
        )

    scores = [score(candidate) for candidate in candidates]
    return drawn(candidates, scores, snapshot, "lowest score")


class LinearParameters(Parameters, frozen=True):
    """`alpha`: ongoing tokens that one cached token is worth."""

    alpha: float = 1.0
    overload: float = 2.0


def decide_linear(
    request: RequestInfo, snapshot: Snapshot, parameters: LinearParameters
) -> Decision:
    """Keep a session on its instance; place others by load and cached prefix.

    score = ongoing tokens - alpha * cached tokens. A session's instance is kept unless
    its ongoing tokens are above `overload` times the mean; then the lowest score
    decides. As an instance's load is at most n times the mean of n, an `overload` of n
    or more never moves a session: with two instances the default of 2 does not.

    Linear combinations of load and cache hit are what LMetric (arXiv:2603.15202,
    section 2) compares with; the session pin and its override are those of the
    reference study.
    """
    candidates = serving(snapshot)
    scores = [
        candidate.ongoing_tokens - parameters.alpha * candidate.cached_tokens
        for candidate in candidates
    ]
    if snapshot.pinned is None:
        return least(candidates, scores, snapshot, "lowest score")
    names = [candidate.name for candidate in candidates]
    if snapshot.pinned not in names:
        reason = "lowest score: the pinned instance is not there"
        return least(candidates, scores, snapshot, reason)
    index = names.index(snapshot.pinned)
    if not _overloaded(candidates[index], candidates, parameters.overload):
        return placed(candidates, scores, index, "pinned")
    reason = f"override: pinned is above {parameters.overload:g}x mean load"
    return least(candidates, scores, snapshot, reason)


def _overloaded(candidate: Candidate, among: list[Candidate], factor: float) -> bool:
    total = sum(other.ongoing_tokens for other in among)
    return candidate.ongoing_tokens * len(among) > factor * total


class CacheAwareParameters(Parameters, frozen=True):
    """Share of the prompt; requests; a factor of them."""

    match_share: float = 0.3
    balance_requests: int = 64
    balance_factor: float = 1.5


def decide_cache_aware(
    request: RequestInfo, snapshot: Snapshot, parameters: CacheAwareParameters
) -> Decision:
    """Choose the longest cached prefix, unless load is uneven or little is cached.

    With requests in flight as load: where the highest is more than `balance_requests`
    above the lowest and more than `balance_factor` times it, the least loaded instance.
    Otherwise the longest cached prefix, if that is above `match_share` of the prompt;
    the least loaded of several. Otherwise the least loaded.

    vllm-router's policy of this name decides so, with these defaults. It matches a
    prompt with a tree of earlier prompts, evicted or not; here the cached prefix comes
    from the proxy's mirror or the KV events.
    """
    candidates = serving(snapshot)
    loads = [candidate.requests for candidate in candidates]
    lowest_load, highest_load = min(loads), max(loads)
    cached = max(candidate.cached_tokens for candidate in candidates)
    scores = [float(load) for load in loads]
    if (
        highest_load - lowest_load > parameters.balance_requests
        and highest_load > parameters.balance_factor * lowest_load
    ):
        reason = "uneven load: the least"
    elif cached > parameters.match_share * request.prompt_tokens:
        reason = "longest cached prefix"
        scores = [-float(candidate.cached_tokens) for candidate in candidates]
    else:
        reason = "little is cached: the least load"
    return least(candidates, scores, snapshot, reason)


class ScorerParameters(Parameters, frozen=True):
    """Weights of the three scores."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0


def decide_llm_d(
    request: RequestInfo, snapshot: Snapshot, parameters: ScorerParameters
) -> Decision:
    """Choose by a sum of three scores between 0 and 1, each with its weight.

    - prefix: the share of the prompt's whole blocks that is cached there;
    - queue: 1 for the instance with the fewest waiting requests, 0 for the most;
    - kv: the share of its KV that is free.

    llm-d's router scores so by default, with these weights (llm-d-router at ebab687),
    and draws among equal scores. Queue and KV are those of the instances' metrics,
    50 ms old at most.
    """
    candidates = serving(snapshot)
    queues = [candidate.waiting or 0 for candidate in candidates]
    longest = max(queues)
    spread = max(1, longest - min(queues))
    blocks = max(1, request.prompt_tokens // BLOCK_TOKENS)
    # With the sign turned: lower is better in a decision.
    scores = [
        -(
            parameters.queue * (longest - queue) / spread
            + parameters.kv * _free_kv(candidate)
            + parameters.prefix
            * min(1.0, candidate.cached_tokens // BLOCK_TOKENS / blocks)
        )
        for candidate, queue in zip(candidates, queues, strict=True)
    ]
    return drawn(candidates, scores, snapshot, "highest weighted score")


def _free_kv(candidate: Candidate) -> float:
    if candidate.kv_used is not None:
        return 1 - candidate.kv_used
    if not candidate.kv_tokens:
        return 1.0
    return max(0.0, 1 - candidate.ongoing_tokens / candidate.kv_tokens)


POLICIES = {
    "round_robin": Policy(decide_round_robin, Parameters, sees_caches=False),
    "load_only": Policy(decide_load_only, Parameters, sees_caches=False),
    "linear": Policy(decide_linear, LinearParameters),
    **{name: _lowest_score(score) for name, score in SCORES.items()},
    "lmetric_study": Policy(decide_lmetric_study, Parameters),
    "dynamo": Policy(decide_dynamo, DynamoParameters),
    "cache_aware": Policy(decide_cache_aware, CacheAwareParameters),
    "unified": Policy(decide_unified, UnifiedParameters),
    "llm_d": Policy(decide_llm_d, ScorerParameters, reads_gauges=True),
}
