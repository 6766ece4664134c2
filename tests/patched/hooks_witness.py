# SPDX-License-Identifier: Apache-2.0
"""A connector with direct read's ledger, and nothing else of direct read.

Loaded into the engine of the same process, by hooks_lab.py.
"""

from connectors.direct_read.ledger import BlockLedger
from connectors.noop import NoopConnector


class EarlyLedger(BlockLedger):
    """Thinks that a block is written one step before it is."""

    def on_block_cached(self, key, block_id):
        self._cached[block_id] = (key, self._steps_begun)


LEDGERS = {"as it is": BlockLedger, "a step early": EarlyLedger}


class HooksWitness(NoopConnector):
    ledger_class = BlockLedger
    ledger: BlockLedger | None = None
    pool = None

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        HooksWitness.pool = gpu_block_pool
        HooksWitness.ledger = self.ledger_class(gpu_block_pool)

    def build_connector_meta(self, scheduler_output):
        self.ledger.begin_step()
        return super().build_connector_meta(scheduler_output)

    def take_events(self):
        self.ledger.finish_step()
        return ()

    # As MultiConnector asks for it.
    def request_finished(self, request, block_ids):
        return False, None
