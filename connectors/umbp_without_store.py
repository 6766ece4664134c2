# SPDX-License-Identifier: Apache-2.0
"""vLLM's UMBP connector on a store that keeps nothing.

The adapter to MORI, which is not in vLLM, is replaced: nothing is found, and each store
has ended when it is polled. Scheduler and worker halves are vLLM's own. Load it with
`kv_connector: UMBPStoreConnector` and
`kv_connector_module_path: connectors.umbp_without_store`.
"""

from collections.abc import Sized

from vllm.distributed.kv_transfer.kv_connector.v1.umbp import (
    UMBPRuntimeFactory,
    UMBPStoreConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.umbp.data import TransferJobState

__all__ = ["UMBPStoreConnector"]


class NothingKept:
    """Runtime of UMBP, and its handles for scheduler and worker."""

    def create_scheduler_handle(
        self, namespace: object, topology: object, layout: object
    ) -> "NothingKept":
        return self

    def create_worker_handle(
        self, namespace: object, topology: object, layout: object
    ) -> "NothingKept":
        return self

    def lookup(self, keys: Sized) -> list[bool]:
        return [False] * len(keys)

    def clear(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def register_buffers(self, kv_caches: object) -> None:
        pass

    def store_blocks(self, plans: object) -> TransferJobState:
        return self.store(plans)

    def store(self, plans: object) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        job.complete()
        return job

    def wait(self, job: TransferJobState) -> TransferJobState:
        return job

    def poll(self, job: TransferJobState) -> TransferJobState:
        return job

    def publish(self, job: TransferJobState) -> None:
        pass

    def take_evicted_keys(self) -> list[object]:
        return []


UMBPRuntimeFactory.register("embedded", lambda config: NothingKept())
