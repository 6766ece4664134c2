# SPDX-License-Identifier: Apache-2.0
"""A real scheduler gives a connector the block pool, and its steps begin and end.

The witness knows which blocks are written without the connector: blocks cached by a
step's schedule() are written when the output of that step is there, and blocks cached
by update_from_output are written already.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
from overlapping import two_steps_in_flight
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.kv_cache_utils import get_block_hash

from connectors.direct_read.ledger import BlockLedger
from connectors.noop import NoopConnector
from kvtax.engine.null_engine import NullEngine
from kvtax.engine.null_model import NOOP


class EarlyLedger(BlockLedger):
    """Thinks that a block is written one step before it is."""

    def on_block_cached(self, key, block_id):
        self._cached[block_id] = (key, self._steps_begun)


LEDGERS = {"as it is": BlockLedger, "a step early": EarlyLedger}


class HooksWitness(NoopConnector):
    ledger_class = BlockLedger
    ledger: BlockLedger | None = None
    pool = None
    workers_called: ClassVar[Counter[str]] = Counter()

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        HooksWitness.pool = gpu_block_pool
        HooksWitness.ledger = self.ledger_class(gpu_block_pool)

    def on_workers_called(self, method) -> None:
        self.workers_called[method] += 1

    def build_connector_meta(self, scheduler_output):
        self.ledger.begin_step()
        return super().build_connector_meta(scheduler_output)

    def take_events(self):
        self.ledger.finish_step()
        return ()

    # As MultiConnector asks for it.
    def request_finished(self, request, block_ids):
        return False, None


WITNESS = {
    "kv_connector": "HooksWitness",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
}
CONFIGS = {
    "alone": WITNESS,
    "in_multi_with_two_steps_in_flight": {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [NOOP, WITNESS]},
    },
}
NUM_BLOCKS = 60
REQUESTS = 120


class Watch:
    """Knows which cached blocks no finished step has written yet."""

    def __init__(self, engine: NullEngine) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._pool = engine.core.scheduler.kv_cache_manager.block_pool
        assert HooksWitness.pool is self._pool
        self._ledger = HooksWitness.ledger
        # By block id: the hash object, and the outputs that must come first.
        self._unwritten: dict[int, tuple[bytes, int]] = {}
        self._known: dict[int, bytes] = {}
        self._scheduled = self._updated = 0
        scheduler = engine.core.scheduler
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched_schedule
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._watched_update

    def steps(self) -> tuple[int, int, int]:
        """Steps begun and ended as the ledger counts them, and updates counted here."""
        return self._ledger._steps_begun, self._ledger._steps_done, self._updated

    def offered_of_cached(self) -> tuple[int, int]:
        """Blocks that the ledger offers now, and blocks that are cached."""
        keys = [block.block_hash for block in self._pool.blocks if block.block_hash]
        offers = [self._ledger.lookup([get_block_hash(key)]) for key in keys]
        return sum(len(offer.block_ids) for offer in offers), len(keys)

    def _watched_schedule(self, *arguments):
        self._check("before schedule")
        output = self._schedule(*arguments)
        self._scheduled += 1
        self._note(self._scheduled)
        self._check("after schedule")
        return output

    def _watched_update(self, *arguments):
        self._check("before update")
        in_flight = self._scheduled - self._updated
        self.counts[f"with {in_flight} in flight"] += 1
        outputs = self._update(*arguments)
        self._updated += 1
        # What is cached meanwhile has been written by now.
        self._note(self._updated)
        self._check("after update")
        return outputs

    def _note(self, step: int) -> None:
        """Blocks that have been cached since the last call need this step's output."""
        for block in self._pool.blocks:
            if block.block_hash is not self._known.get(block.block_id):
                self._known[block.block_id] = block.block_hash
                if block.block_hash is not None:
                    self._unwritten[block.block_id] = block.block_hash, step

    def _check(self, when: str) -> None:
        for block in self._pool.blocks:
            if block.block_hash is None:
                continue
            offer = self._ledger.lookup([get_block_hash(block.block_hash)])
            if offer.block_ids != [block.block_id]:
                self.counts[f"{offer.stopped or 'duplicate'} {when}"] += 1
                continue
            self.counts[f"offered {when}"] += 1
            key, step = self._unwritten.get(block.block_id, (None, 0))
            if key is block.block_hash and step > self._updated:
                self.problems.append(f"{when}: a block of step {step} is offered")
            assert self._ledger.validate(offer.token) == 1


@cache
def run(model: Path, how: str, ledger: str = "as it is") -> Watch:
    """The watch over an engine that has done all its requests and is idle."""
    HooksWitness.ledger_class = LEDGERS[ledger]
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    alone = how == "alone"
    with nullcontext() if alone else two_steps_in_flight(NUM_BLOCKS):
        engine = NullEngine(model, CONFIGS[how], NUM_BLOCKS)
    watch = Watch(engine)
    chance = random.Random(5)
    prompts = [[n + 1] * chance.randrange(1, 200) for n in range(30)]
    for _ in range(REQUESTS):
        engine.add(chance.choice(prompts), chance.randrange(1, 60))
        for _ in range(chance.randrange(12)):
            if engine.core.scheduler.has_requests():
                engine.core.step_fn()
    while engine.core.scheduler.has_requests() or engine.core.batch_queue:
        engine.core.step_fn()
    HooksWitness.workers_called.clear()
    engine.core.collective_rpc("get_kv_cache_spec")
    watch.counts["workers called"] = HooksWitness.workers_called["get_kv_cache_spec"]
    return watch


PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"


HOW = ["alone", "in_multi_with_two_steps_in_flight"]


@pytest.mark.parametrize("how", HOW)
def test_blocks_are_offered_when_they_are_written(model, how):
    in_flight = 1 if how == "alone" else 2
    watched = run(model, how)
    counts = watched.counts
    assert not watched.problems, watched.problems[:20]
    assert counts[f"with {in_flight} in flight"] > 100, counts
    assert counts["in_flight after schedule"] > 100, counts
    assert counts["offered after update"] > 1_000, counts
    begun, done, updated = watched.steps()
    assert begun == done == updated > 100
    # An idle engine offers all that is cached, and sees calls of the workers.
    offered, cached = watched.offered_of_cached()
    assert offered == cached > 10
    assert counts["workers called"] == 1


def test_a_ledger_that_is_a_step_early_is_noticed(model):
    assert run(model, "alone", "a step early").problems
