# SPDX-License-Identifier: Apache-2.0
"""Listeners of the block pool: variants of the code, and a state machine.

A variant is loaded from a text of the patched pool, so that many live in one process
and in vLLM's own KVCacheManager. In the state machine, replicas made from the calls
alone equal the pool after every operation, and after every take the walk, the tracker
and the pool agree about every key.
"""

from __future__ import annotations

import importlib.util
import types
from collections import Counter
from dataclasses import dataclass, field
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, block_pool_listener, kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvtax.paths import PATCHES

BLOCK_SIZE = 2
MAX_MODEL_LEN = 64
WINDOW_BLOCKS = 2

Pair = tuple[bytes, int]


def load(module: types.ModuleType, text: str | None) -> types.ModuleType:
    """The module again, from another text; itself without one."""
    if text is None:
        return module
    edited = types.ModuleType(module.__name__)
    exec(compile(text, module.__file__, "exec", dont_inherit=True), vars(edited))
    return edited


def load_hash_sync() -> types.ModuleType:
    """The walk, which as a patch fits fewer releases than the listener."""
    path = PATCHES / "mooncake_hash_sync" / "hash_sync.py"
    spec = importlib.util.spec_from_file_location("hash_sync", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Replica(block_pool_listener.BlockPoolListener):
    """The (key, block id) pairs that a pool holds, from what its listeners are told.

    Raises AssertionError if told what cannot be.
    """

    def __init__(self) -> None:
        self.pairs: set[Pair] = set()
        self.heard: list[tuple] = []

    def on_block_cached(self, key: bytes, block_id: int) -> None:
        assert (key, block_id) not in self.pairs, "cached twice"
        self.pairs.add((key, block_id))
        self.heard.append(("cached", key, block_id))

    def on_block_evicted(self, key: bytes, block_id: int) -> None:
        assert (key, block_id) in self.pairs, "evicted but never cached"
        self.pairs.remove((key, block_id))
        self.heard.append(("evicted", key, block_id))

    def on_cache_reset(self) -> None:
        self.pairs.clear()
        self.heard.append(("reset",))


class Variant:
    """Makes pools, managers and trackers; `pool` is another text of block_pool.py."""

    tracker = block_pool_listener.BlockHashTracker

    def __init__(self, pool: str | None = None) -> None:
        self._pool_class = load(block_pool, pool).BlockPool
        self.walk = load_hash_sync().BlockHashWalk

    def pool(self, num_blocks: int) -> BlockPool:
        return self._pool_class(num_blocks, True, BLOCK_SIZE)

    def manager(
        self, num_blocks: int, sliding_window: bool = False, caching: bool = True
    ) -> KVCacheManager:
        """vLLM's manager on a pool of this variant; one or two groups of layers."""
        shape: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        specs = [FullAttentionSpec(**shape)]
        if sliding_window:
            window = WINDOW_BLOCKS * BLOCK_SIZE
            specs.append(SlidingWindowSpec(**shape, sliding_window=window))
        groups = [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)]
        options = {"hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
        known = signature(KVCacheManager).parameters
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv_cache_coordinator, "BlockPool", self._pool_class)
            return KVCacheManager(
                KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
                max_model_len=MAX_MODEL_LEN,
                enable_caching=caching,
                **{name: options[name] for name in options if name in known},
            )

    @staticmethod
    def listen(pool: BlockPool) -> Replica:
        replica = Replica()
        pool.add_listener(replica)
        return replica


def cache(pool: BlockPool, *keys: bytes) -> list[KVCacheBlock]:
    """New blocks of the pool, in use, one cached under each key (of group 0)."""
    blocks = pool.get_new_blocks(len(keys))
    request = SimpleNamespace(block_hashes=list(keys))
    pool.cache_full_blocks(request, blocks, 0, len(keys), BLOCK_SIZE, 0)
    return blocks


def pairs_held(pool: BlockPool) -> set[Pair]:
    """All that the pool's prefix cache holds, duplicates of a key included."""
    return {
        (key, block_id)
        for key, blocks in pool.cached_block_hash_to_block._cache.items()
        for block_id in (blocks if isinstance(blocks, dict) else [blocks.block_id])
    }


def first_blocks(pool: BlockPool) -> dict[bytes, int]:
    """The block that a lookup of each key finds."""
    block_map = pool.cached_block_hash_to_block
    return {key: block_map.get_one_block(key).block_id for key in block_map._cache}


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
            changed = {call[1] for call in heard if call[0] != "reset"}
            # No more than what changed, unless it was told to start over.
            assert changes.cleared or {*changes.cached, *changes.evicted} == changed
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


THOROUGH = settings(
    max_examples=200,
    stateful_step_count=100,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# The first failure is enough, and the same in every run.
QUICK = settings(
    THOROUGH,
    max_examples=200,
    phases=[Phase.generate],
    derandomize=True,
    report_multiple_bugs=False,
)


def run_machine(variant: Variant, effort: settings) -> Counter[str]:
    """Counts of the events in the run. Raises what the machine found wrong."""

    class Machine(PoolMachine):
        pass

    Machine.variant, Machine.counts = variant, Counter()
    run_state_machine_as_test(Machine, settings=effort)
    return Machine.counts


def check_explored(counts: Counter[str]) -> None:
    """The run had enough of every event that changes the pool."""
    assert counts["operations"] > 5_000
    assert counts["takes"] > 1_000
    assert counts["evictions"] > 1_000
    for event in (
        "duplicates",
        "hits",
        "preemptions",
        "resets",
        "refused resets",
        "late joins",
        "pops of nothing",
        "overflows",
        "wrong by walk",  # what the walk cannot see, and the tracker did
    ):
        assert counts[event] > 0, event
