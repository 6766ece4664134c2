# SPDX-License-Identifier: Apache-2.0
"""A connector with direct read's admission. Its pulls move no bytes, take a few steps
and sometimes fail.

Loaded into the engine of the same process, by test_admission.py.
"""

import random
from collections import Counter
from typing import ClassVar

from connectors.direct_read.admission import Admission
from connectors.noop import NoopConnector

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
