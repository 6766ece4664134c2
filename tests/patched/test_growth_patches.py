# SPDX-License-Identifier: Apache-2.0
"""The patches against work that grows decide what upstream decides.

Metadata, hits, blocks and events are compared with upstream's, whatever the requests
do. With one thing wrong in a patch, the two are found to differ.
"""

from __future__ import annotations

import inspect
import queue
import threading
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.harness.before_after import Twin, before_and_after
from tests.harness.scheduler_alone import (
    BLOCK_SIZE,
    OFFLOADING,
    STORE,
    LoneScheduler,
    Subject,
)

THOROUGH = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
# The first failure is enough.
QUICK = settings(
    THOROUGH, max_examples=60, phases=[Phase.generate], report_multiple_bugs=False
)

ARRIVAL = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # which prompts share a prefix
    st.integers(1, 5 * BLOCK_SIZE),  # prompt tokens
    st.integers(1, 6 * BLOCK_SIZE),  # output tokens
)
STEP = st.tuples(st.just("step"), st.booleans(), st.integers(1, 24))
ABORT = st.tuples(st.just("abort"), st.integers(0, 99))
EVENTS = st.lists(
    st.one_of(ARRIVAL, ARRIVAL, STEP, STEP, ABORT), min_size=10, max_size=40
)


def skip_without(subject: Subject) -> None:
    """Skip where the release has no such code."""
    try:
        spec = find_spec(subject.module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        pytest.skip(f"this vLLM has no {subject.module}; make release-test runs it")


class Pair:
    """A fix's connector of both versions, on a small block pool."""

    def __init__(
        self,
        subject: Subject,
        model: Path,
        edit: tuple[str, str] | None = None,
        **transfer: Any,
    ) -> None:
        self._subject, self._model = subject, model
        self._modules = before_and_after(subject.module, edit)
        self._transfer = subject.kv_transfer | transfer
        self.counts: Counter[str] = Counter()

    def scheduler(self) -> LoneScheduler:
        for module in self._modules:
            self._subject.prepare(module)
        return LoneScheduler(
            self._model,
            self._transfer,
            lambda *configs: Twin(
                *(self._subject.make(module, *configs) for module in self._modules)
            ),
            self._subject.worker(),
            # Too few for all, so that some are preempted.
            num_blocks=18,
            max_model_len=12 * BLOCK_SIZE,
            max_requests=8,
            max_batched_tokens=4 * BLOCK_SIZE,
        )

    def notice(self) -> bool:
        """Whether the two are found to differ."""
        try:
            self.explore(QUICK)
        except Exception:
            traceback.print_exc()
            return True
        return False

    def explore(self, effort: settings) -> Counter[str]:
        """Counts of what happened. Raises AssertionError where the two differ."""
        lone = self.scheduler()

        @effort
        @given(EVENTS)
        def run(events: list[tuple]) -> None:
            self._run(lone, events)

        run()
        return self.counts

    def _run(self, lone: LoneScheduler, events: list[tuple]) -> None:
        names = []
        for kind, *what in events:
            if kind == "add":
                family, prompt_tokens, output_tokens = what
                shared = min(prompt_tokens, 3 * BLOCK_SIZE)
                number = self.counts["requests"]
                own = [10 + number // 1_000, number % 1_000] * prompt_tokens
                prompt = ([family + 1] * shared + own)[:prompt_tokens]
                names.append(lone.add(prompt, output_tokens))
                self.counts["requests"] += 1
            elif kind == "abort" and names:
                name = names[what[0] % len(names)]
                self.counts["aborts"] += name in lone.core.requests
                lone.abort(name)
            elif kind == "step":
                reporting, steps = what
                for _ in range(steps):
                    self._count(lone.step(reporting))
        for name in names:
            lone.abort(name)
        # What is in flight ends, so that the next example starts alike.
        for _ in range(3):
            lone.step()
        assert not lone.core.requests
        assert lone.core.reset_prefix_cache()

    def _count(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        self.counts["steps"] += 1
        self.counts["new"] += len(output.scheduled_new_reqs)
        self.counts["cached"] += len(cached.req_ids)
        self.counts["preemptions"] += len(output.preempted_req_ids or ())
        self.counts["finished"] += len(output.finished_req_ids)
        self.count(output.kv_connector_metadata)

    def count(self, meta: Any) -> None:
        """What is in the connector's own metadata."""


with suppress(ModuleNotFoundError):
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import push_worker

PATCHES = [
    "block_pool_bounded_hashes",
    "mooncake_store_pending_loads",
    "nixl_push_idle_wake",
    "offloading_new_hashes_only",
]


# block_pool_bounded_hashes

HASH_TOKENS, MOST_BLOCKS = 4, 24
# How many blocks each chunk adds, which blocks are null, and which are masked out.
CHUNKS = st.lists(st.integers(1, 7), min_size=1, max_size=8)
NULLS = st.sets(st.integers(0, MOST_BLOCKS - 1), max_size=4)


def explore(hashes_per_block: int, effort, edit: tuple[str, str] | None = None) -> int:
    """How many blocks were cached. Raises AssertionError where the two differ."""
    modules = before_and_after("vllm.v1.core.block_pool", edit)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    block_tokens = HASH_TOKENS * hashes_per_block
    cached = 0

    @effort
    @given(CHUNKS, NULLS, NULLS)
    def run(chunks: list[int], nulls: set[int], masked: set[int]) -> None:
        nonlocal cached
        request = Request(
            request_id="r",
            prompt_token_ids=list(range(MOST_BLOCKS * block_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=None,
            block_hasher=hasher,
        )
        pools = [
            module.BlockPool(MOST_BLOCKS + 1, True, HASH_TOKENS, True)
            for module in modules
        ]
        tables = [pool.get_new_blocks(MOST_BLOCKS) for pool in pools]
        done = 0
        for chunk in chunks:
            full = min(done + chunk, MOST_BLOCKS)
            for pool, table in zip(pools, tables, strict=True):
                blocks = [
                    pool.null_block if index in nulls else block
                    for index, block in enumerate(table)
                ]
                more = {}
                if "block_mask" in inspect.signature(pool.cache_full_blocks).parameters:
                    mask = [index not in masked for index in range(done, full)]
                    more["block_mask"] = mask
                pool.cache_full_blocks(
                    request, blocks, done, full, block_tokens, 0, **more
                )
            done = full
            seen = [[block.block_hash for block in table] for table in tables]
            assert seen[0] == seen[1]
            keys = [list(pool.cached_block_hash_to_block._cache) for pool in pools]
            assert keys[0] == keys[1]
            events = [pool.take_events() for pool in pools]
            assert events[0] == events[1]
        cached += len(keys[0])

    run()
    return cached


@pytest.mark.parametrize("hashes_per_block", [1, 3])
def test_map_blocks_and_events_are_upstreams(hashes_per_block):
    """In chunks, with null blocks and masks, blocks of one hash or of three."""
    assert explore(hashes_per_block, THOROUGH) > 1_000


def test_a_bound_that_starts_elsewhere_is_noticed():
    edit = ("block_hashes[num_cached_blocks:num_full", "block_hashes[0:num_full")
    with pytest.raises(AssertionError):
        explore(1, QUICK, edit)


# nixl_push_idle_wake

WAITING = ["_recving_metadata", "_reqs_to_process", "_reqs_to_send"]


@pytest.fixture
def worker(monkeypatch):
    """The real worker's step, on a base class that has nothing to report."""
    if "push_worker" not in globals():
        pytest.skip("this vLLM has no NixlPush; make release-test runs it")
    kind = push_worker.NixlPushConnectorWorker
    if ask := getattr(kind, "get_transfer_results", None):
        nothing, popped = base.KVConnectorTransferResults, (set(), set())
    else:
        # Before 0.30.0, which tells of failures, too.
        ask, nothing, popped = kind.get_finished, lambda: (set(), set()), set()
    monkeypatch.setattr(
        push_worker.NixlBaseConnectorWorker, ask.__name__, lambda self: nothing()
    )
    made = object.__new__(kind)
    made._push_writer_wake = threading.Event()
    made._sending_transfers_lock = threading.Lock()
    made._sending_transfers, made._send_failures = {}, set()
    made._evict_finished_inbox = queue.Queue()
    made.consumer_notification_counts_by_req = defaultdict(int)
    made._recving_metadata, made._reqs_to_send = {}, {}
    made._reqs_to_process = set()
    made._pop_done_transfers = lambda transfers: popped
    made.step = lambda: ask(made)
    return made


def test_a_step_without_requests_wakes_nobody(worker):
    worker.step()
    assert not worker._push_writer_wake.is_set()


@pytest.mark.parametrize("where", WAITING)
def test_a_step_with_a_request_on_the_way_wakes_the_writer(worker, where):
    waiting = getattr(worker, where)
    waiting.add("one") if isinstance(waiting, set) else waiting.update(one=1.0)
    worker.step()
    assert worker._push_writer_wake.is_set()


# mooncake_store_pending_loads

CONDITION = "if request_id not in self.load_specs:"
STORES = {
    "both": {},
    "sync loads": {"extra": {"load_async": False}},
    "late lookups, decode saved": {
        "extra": {"lookup_async": True, "save_decode_cache": True}
    },
    "consumer": {"kv_role": "kv_consumer"},
}


class StorePair(Pair):
    def __init__(self, model, edit=None, extra=None, **transfer) -> None:
        skip_without(STORE)
        if extra:
            transfer["kv_connector_extra_config"] = extra
        super().__init__(STORE, model, edit, **transfer)

    def count(self, meta: Any) -> None:
        self.counts["loads"] += sum(
            request.load_spec is not None for request in meta.requests
        )
        self.counts["saves"] += sum(bool(request.can_save) for request in meta.requests)


@pytest.mark.parametrize("config", STORES)
def test_a_store_answers_what_upstreams_answers(model, config):
    counts = StorePair(model, **STORES[config]).explore(THOROUGH)
    assert counts["loads"] > 20
    assert config == "consumer" or counts["saves"] > 20
    assert min(counts[of] for of in ("preemptions", "aborts", "cached")) > 5


def test_a_load_that_is_never_sent_is_noticed(model):
    assert StorePair(model, edit=(CONDITION, "if True:")).notice()


def test_a_load_that_is_dropped_in_the_step_it_is_found_is_noticed(model):
    wrong = f"if self.load_specs.pop(request_id, None) is None or {CONDITION[3:]}"
    assert StorePair(model, edit=(CONDITION, wrong)).notice()


# offloading_new_hashes_only

TIERS = {
    "in chunks of a block": {"cpu_bytes_to_use": 4_194_304, "block_size": 16},
    "in chunks of two": {"cpu_bytes_to_use": 4_194_304, "block_size": 32},
    "too small": {"cpu_bytes_to_use": 16_384},
}


class OffloadingPair(Pair):
    def __init__(self, model, tier="in chunks of a block", edit=None) -> None:
        skip_without(OFFLOADING)
        transfer = {"kv_connector_extra_config": TIERS[tier]}
        super().__init__(OFFLOADING, model, edit, **transfer)

    def count(self, meta: Any) -> None:
        self.counts["loads"] += len(meta.load_jobs)
        self.counts["saves"] += len(meta.store_jobs)


@pytest.mark.parametrize("tier", TIERS)
def test_offloading_answers_what_upstreams_answers(model, tier):
    counts = OffloadingPair(model, tier).explore(THOROUGH)
    assert min(counts[of] for of in ("loads", "saves")) > 20
    assert min(counts[of] for of in ("preemptions", "aborts", "cached")) > 5


WRONG_STARTS = {
    "one off": ("offload_keys) + 1) - 1", "offload_keys) + 1)"),
    "read again": ("block_hashes[start::", "block_hashes[start % 1 ::"),
}


@pytest.mark.parametrize("wrong", WRONG_STARTS)
def test_hashes_that_start_elsewhere_are_noticed(model, wrong):
    assert OffloadingPair(model, edit=WRONG_STARTS[wrong]).notice()
