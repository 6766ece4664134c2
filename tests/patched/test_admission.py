# SPDX-License-Identifier: Apache-2.0
"""However many requests pull, and however few blocks there are, all end.

The pulls of the connector in this module move no bytes, take a few steps and sometimes
fail.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from connectors.direct_read.scheduler import Admission
from connectors.noop import NoopConnector
from kvtax.engine.null_engine import NullEngine

BLOCK_SIZE = 16
MAX_STEPS = 10


class AdmitsAll(Admission):
    def admits(self, request, pulls):
        return True


class LetsNonePass(Admission):
    """Lets a request that does not fit and pulls nothing end the scan of the queue."""

    def admits(self, request, pulls):
        return super().admits(request, pulls) or not pulls


class ReservesNothing(Admission):
    """Does not reserve room for the rest of the requests that pull."""

    def admits(self, request, pulls):
        return super().admits(request, False)


ADMISSIONS = {
    "as it is": Admission,
    "admits all": AdmitsAll,
    "lets none pass": LetsNonePass,
    "reserves nothing": ReservesNothing,
}


class AdmissionWitness(NoopConnector):
    """State is on the class, because scheduler and worker each make an instance."""

    pool: ClassVar = None
    admission: ClassVar[Admission]
    chance: ClassVar[random.Random]
    counts: ClassVar[Counter[str]]
    # By request, all three. Steps for which its peer still does not answer.
    unanswered: ClassVar[dict[str, int]]
    # Tokens of the prompt that the peer has.
    offered: ClassVar[dict[str, int]]
    # Steps for which it still loads, and the blocks.
    loading: ClassVar[dict[str, tuple[int, list[int]]]]
    failed: ClassVar[set[int]]

    @classmethod
    def begin(cls, admission: str, seed: int) -> None:
        cls.admission = ADMISSIONS[admission](cls.pool, BLOCK_SIZE)
        cls.chance = random.Random(seed)
        cls.counts = Counter()
        cls.unanswered, cls.offered, cls.loading = {}, {}, {}
        cls.failed = set()

    @classmethod
    def counted(cls) -> dict[str, int]:
        return dict(cls.counts) | {"left_waiting": len(cls.admission._waiting)}

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        AdmissionWitness.pool = gpu_block_pool
        self.begin("as it is", 0)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        name = request.request_id
        if name not in self.unanswered:
            self.unanswered[name] = self.chance.randrange(MAX_STEPS)
            # Some have nothing to pull.
            share = self.chance.choice([0, self.chance.random(), self.chance.random()])
            self.offered[name] = int(share * request.num_tokens)
        if self.unanswered[name]:
            self.unanswered[name] -= 1
            return None, False
        tokens = min(self.offered[name], request.num_tokens - 1) - num_computed_tokens
        blocks = max(tokens // BLOCK_SIZE, 0)
        if not self.admission.admits(request, blocks > 0):
            self.counts["held_back"] += 1
            return None, False
        return blocks * BLOCK_SIZE, blocks > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            name = request.request_id
            self.admission.pulls(request)
            # A request pulls once.
            self.offered[name] = 0
            (block_ids,) = blocks.get_block_ids()
            self.loading[name] = self.chance.randrange(MAX_STEPS), block_ids
            self.counts["pulls"] += 1

    def build_connector_meta(self, scheduler_output):
        self.admission.end_schedule(scheduler_output.num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(self, request, block_ids):
        self.admission.finished(request.request_id)
        return False, None

    def get_finished(self, finished_req_ids):
        ended = {name for name, (left, _) in self.loading.items() if left == 0}
        for name in sorted(ended):
            _, block_ids = self.loading.pop(name)
            if self.chance.random() < 0.3:
                first = self.chance.randrange(len(block_ids))
                self.failed.update(block_ids[first:])
        for name, (left, block_ids) in self.loading.items():
            self.loading[name] = left - 1, block_ids
        return None, ended or None

    def get_block_ids_with_load_errors(self):
        failed, AdmissionWitness.failed = self.failed, set()
        return failed


PATCHES = ["block_pool_delta_listener", "direct_read_hooks"]
ONLY = "0.18.1"
CONTROLS = ["admits all", "lets none pass", "reserves nothing"]
WITNESS = {
    "kv_connector": "AdmissionWitness",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NUM_BLOCKS = 60
MOST_BLOCKS = 45
MOST_OUTPUT_TOKENS = 40
REQUESTS = 1_500
AT_ONCE = 12
# Whoever is answered and has pulled is so before.
STALLED_STEPS = 20 * MAX_STEPS


def run(engine: NullEngine, chance: random.Random) -> bool:
    """Whether all requests ended, rather than that nothing did any more."""
    scheduler = engine.core.scheduler
    left, idle_steps = REQUESTS, 0
    executed = True
    while left or scheduler.has_requests():
        while left and scheduler.get_num_unfinished_requests() < AT_ONCE:
            tokens = chance.randrange(1, MOST_BLOCKS * BLOCK_SIZE)
            prompt = [chance.randrange(1, 500) for _ in range(tokens)]
            name = engine.add(prompt, chance.randrange(1, MOST_OUTPUT_TOKENS))
            left -= 1
        # Not an idle engine's: that could end what stands still.
        if executed and chance.random() < 0.02:
            engine.core.abort_requests([name])
        _, executed = engine.core.step_fn()
        idle_steps = 0 if executed else idle_steps + 1
        if idle_steps > STALLED_STEPS:
            engine.core.abort_requests(list(scheduler.requests))
            engine.run_to_end()
            return False
    return True


@pytest.fixture(scope="module")
def engine(model):
    kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
    return NullEngine(model, WITNESS, NUM_BLOCKS)


def outcome(engine: NullEngine, admission: str, seed: int) -> dict:
    AdmissionWitness.begin(admission, seed)
    ended = run(engine, random.Random(seed))
    assert engine.core.scheduler.reset_prefix_cache()
    return {"ended": ended} | AdmissionWitness.counted()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_request_waits_for_ever(engine, seed):
    counts = outcome(engine, "as it is", seed)
    assert counts["ended"], counts
    assert counts["pulls"] > 100, counts
    assert counts["held_back"] > 100, counts
    assert counts["left_waiting"] == 0, counts


@pytest.mark.long
@pytest.mark.parametrize("control", CONTROLS)
def test_without_a_rule_the_engine_stands_still(engine, control):
    counts = outcome(engine, control, 1)
    assert not counts["ended"], counts
