# SPDX-License-Identifier: Apache-2.0
"""Listeners beside any sequence of what a scheduler does to vLLM's KVCacheManager.

After every operation, replicas made from the calls alone equal the pool. After every
take, the walk, the tracker and the pool agree about every key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from listener_variant import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Replica,
    Variant,
    first_blocks,
    pairs_held,
)
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

# Too few for the running requests, so that eviction and preemption never stop.
NUM_BLOCKS = 12
MAX_RUNNING = 4
MAX_SUBSCRIBERS = 3
# Prompts are prefixes of these: they share one block, or all they have.
TRUNK = st.sampled_from([[1, 1, *range(2, 14)], [1, 1, *range(20, 32)]])
TOKENS = st.integers(1, 14)
WHICH = st.integers(0, 20)

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


@dataclass
class Subscriber:
    """One that hears every call, a tracker and a walk, and the maps made of them."""

    replica: Replica
    tracker: object
    walk: object
    tracked: dict[bytes, int] = field(default_factory=dict)
    walked: dict[bytes, int] = field(default_factory=dict)

    def take(self, pool: BlockPool, counts: Counter[str]) -> None:
        heard, self.replica.heard = self.replica.heard, []
        changes = self.tracker.take()
        assert (changes is None) == (not heard)
        if changes is not None:
            changes.apply_to(self.tracked)
            told = {call[1] for call in heard if call[0] != "reset"}
            # No more than what changed, unless it was told to start over.
            assert changes.cleared or {*changes.cached, *changes.evicted} == told
            counts["cleared"] += changes.cleared
            counts["overflows"] += changes.cleared and ("reset",) not in heard
        self.walk.take().apply_to(self.walked)

        expected = first_blocks(pool)
        assert self.tracked == expected
        assert self.walked.keys() == expected.keys()
        assert self.tracker.take() is None
        counts["takes"] += 1
        counts["evictions"] += sum(call[0] == "evicted" for call in heard)
        counts["wrong by walk"] += sum(
            (key, block_id) not in self.replica.pairs
            for key, block_id in self.walked.items()
        )


class PoolMachine(RuleBasedStateMachine):
    """`variant` is the code under test; `counts` add up the events of all runs."""

    variant: Variant
    counts: Counter[str]

    @initialize(sliding_window=st.booleans(), take_at_every_step=st.booleans())
    def start(self, sliding_window: bool, take_at_every_step: bool) -> None:
        self.manager = self.variant.manager(NUM_BLOCKS, sliding_window)
        self.pool: BlockPool = self.manager.block_pool
        # Loading from elsewhere is for one kind of layers in the oldest release.
        self.can_load = not sliding_window
        self.take_at_every_step = take_at_every_step
        self.numbers = count()
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.subscribers: list[Subscriber] = []
        self.join()

    # Requests: what Scheduler does with them.

    def request(self, trunk: list[int], tokens: int, own: bool) -> Request:
        """One with the prompt of others, or with half a prompt of its own."""
        number = next(self.numbers)
        prompt = trunk[:tokens]
        if own:
            prompt[tokens // 2 :] = [100 + number] * (tokens - tokens // 2)
        params = SamplingParams(max_tokens=MAX_MODEL_LEN)
        return Request(str(number), prompt, params, None, block_hasher=HASHER)

    @precondition(lambda self: len(self.running) < MAX_RUNNING)
    @rule(trunk=TRUNK, tokens=TOKENS, own=st.booleans(), chunk=TOKENS)
    def arrive(self, trunk: list[int], tokens: int, own: bool, chunk: int) -> None:
        self.admit(self.request(trunk, tokens, own), chunk)

    @precondition(lambda self: self.waiting and len(self.running) < MAX_RUNNING)
    @rule(chunk=TOKENS)
    def resume(self, chunk: int) -> None:
        self.admit(self.waiting.pop(0), chunk)

    def admit(self, request: Request, chunk: int) -> None:
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        new = min(chunk, request.num_tokens - hit)
        if self.manager.allocate_slots(request, new, hit, blocks) is None:
            self.waiting.append(request)
            return
        request.num_computed_tokens = hit + new
        self.running.append(request)
        self.counts["hits"] += hit > 0

    @precondition(lambda self: self.can_load and len(self.loading) < 2)
    @rule(trunk=TRUNK, tokens=TOKENS, own=st.booleans())
    def load(self, trunk: list[int], tokens: int, own: bool) -> None:
        """Blocks are allocated now and cached when their content has arrived."""
        request = self.request(trunk, tokens, own)
        blocks, hit, *_ = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request,
            num_new_tokens=0,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_external_computed_tokens=tokens - hit,
            delay_cache_blocks=True,
        )
        if allocated is not None:
            self.loading.append(request)

    @precondition(lambda self: self.loading)
    @rule(which=WHICH)
    def loaded(self, which: int) -> None:
        request = self.loading.pop(which % len(self.loading))
        self.manager.cache_blocks(request, request.num_tokens)
        # All but the last token, which is computed again for its logits.
        request.num_computed_tokens = request.num_tokens - 1
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(chunk=TOKENS, token=st.integers(0, 9))
    def step(self, chunk: int, token: int) -> None:
        """The next chunk of each prompt, or one more output token."""
        for request in list(self.running):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(token)
            new = min(chunk, request.num_tokens - request.num_computed_tokens)
            if self.manager.allocate_slots(request, new) is None:
                self.preempt(self.running.index(request))
            else:
                request.num_computed_tokens += new

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def preempt(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)
        self.counts["preemptions"] += 1

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self.manager.free(self.running.pop(which % len(self.running)))

    # The prefix cache itself.

    @rule(block_ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=6))
    def evict(self, block_ids: set[int]) -> None:
        self.manager.evict_blocks(block_ids)

    @precondition(lambda self: len(self.pool.cached_block_hash_to_block) > 7)
    @rule(preempt_first=st.booleans())
    def reset(self, preempt_first: bool) -> None:
        if preempt_first:
            while self.running:
                self.preempt(0)
        idle = not (self.running or self.loading)
        assert self.manager.reset_prefix_cache() == idle
        self.counts["resets" if idle else "refused resets"] += 1

    @precondition(lambda self: len(self.pool.cached_block_hash_to_block))
    @rule(which=WHICH, block_id=st.integers(1, NUM_BLOCKS - 1))
    def pop_a_block_that_has_not_the_key(self, which: int, block_id: int) -> None:
        keys = list(self.pool.cached_block_hash_to_block._cache)
        key = keys[which % len(keys)]
        if (key, block_id) not in pairs_held(self.pool):
            assert self.pool.cached_block_hash_to_block.pop(key, block_id) is None
            self.counts["pops of nothing"] += 1

    # Who listens.

    @precondition(lambda self: len(self.subscribers) < MAX_SUBSCRIBERS)
    @rule()
    def join(self) -> None:
        self.counts["late joins"] += len(self.pool.cached_block_hash_to_block) > 0
        self.subscribers.append(
            Subscriber(
                self.variant.listen(self.pool),
                self.variant.tracker(self.pool),
                self.variant.walk(self.pool),
            )
        )

    @precondition(lambda self: len(self.subscribers) > 1)
    @rule(which=WHICH)
    def take(self, which: int) -> None:
        """By all but the first, which takes only at the end: its changes overflow."""
        subscriber = self.subscribers[1 + which % (len(self.subscribers) - 1)]
        subscriber.take(self.pool, self.counts)

    @invariant()
    def replicas_equal_the_pool(self) -> None:
        held = pairs_held(self.pool)
        for subscriber in self.subscribers:
            assert subscriber.replica.pairs == held
        self.counts["operations"] += 1
        self.counts["duplicates"] += len(held) > len({key for key, _ in held})

    @invariant()
    def what_is_buffered_is_bounded(self) -> None:
        for subscriber in self.subscribers:
            assert len(subscriber.tracker._changed) < 3 * NUM_BLOCKS

    @invariant()
    def takers_of_every_step_are_right(self) -> None:
        if self.take_at_every_step:
            self.teardown()

    def teardown(self) -> None:
        for subscriber in getattr(self, "subscribers", ()):
            subscriber.take(self.pool, self.counts)
