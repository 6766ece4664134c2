# SPDX-License-Identifier: Apache-2.0
"""The connectors whose scheduler's side is fixed, and workers played for them."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from costs.growth.scheduler import BLOCK_SIZE

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Subject:
    """A connector: its patch, its modules and classes, and --kv-transfer-config."""

    patch: str
    module: str
    scheduler: str
    connector_module: str
    connector: str
    kv_transfer: dict[str, Any]
    # A worker that is played for it.
    worker: Callable[[], Any]
    # What stands in for its connection to another process.
    client: tuple[str, type] | None = None

    @property
    def idle(self) -> dict[str, Any]:
        """--kv-transfer-config of one that finds nothing to load."""
        extra = self.kv_transfer.get("kv_connector_extra_config", {})
        return self.kv_transfer | {
            "kv_connector_extra_config": extra | {"test_hits": False}
        }

    def prepare(self, module: ModuleType) -> None:
        if self.client:
            setattr(module, *self.client)

    def make(self, module: ModuleType, *configs: Any) -> Any:
        """The connector with the scheduler's side of `module`."""
        package = importlib.import_module(self.connector_module)
        shipped = getattr(package, self.scheduler)
        setattr(package, self.scheduler, getattr(module, self.scheduler))
        try:
            return getattr(package, self.connector)(*configs)
        finally:
            setattr(package, self.scheduler, shipped)


class StoreLookup:
    """Answers at once, in MooncakeStore's place, how many tokens the store has.

    It has a part of about every second prompt, always the same one; none where the
    config says `test_hits = false`. A late lookup answers when it is asked again.
    """

    def __init__(self, config: Any) -> None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        self._late = extra.get("lookup_async", False)
        self._hits = extra.get("test_hits", True)
        self._asked: set[str] = set()

    def lookup(self, *arguments: Any, non_block: bool = False) -> Any:
        # 0.22.1 asks without the request's id.
        num_tokens, hashes = arguments[-2:]
        name = arguments[0] if len(arguments) == 3 else str(hashes)
        if non_block and self._late and name not in self._asked:
            self._asked.add(name)
            return None
        blocks = (num_tokens - 1) // BLOCK_SIZE
        draw = zlib.crc32(b"".join(hashes[:blocks]) or b"-")
        hit = draw // 2 % (blocks + 1) * BLOCK_SIZE if draw % 2 and self._hits else 0
        data = importlib.import_module(f"{V1}.mooncake.store.data")
        result = getattr(data, "MooncakeLookupResult", None)
        return hit if result is None else result(hit)

    def discard(self, name: str) -> None:
        self._asked.discard(name)


class StoreWorker:
    """MooncakeStore's worker: every load and save ends well, when it is asked."""

    def __init__(self) -> None:
        self._loading: list[str] = []
        self._saved: dict[int, int] = {}

    def take(self, meta: Any) -> None:
        for request in meta.requests:
            if request.load_spec is not None and request.load_spec.can_load:
                self._loading.append(request.req_id)
            if (job := getattr(request, "store_job_id", None)) is not None:
                self._saved[job] = 1

    def report(self, requests: dict[str, Any]) -> dict[str, Any]:
        return reported(self, requests, "mooncake.store.data", "completed_saves")


class OffloadingWorker:
    """Offloading's worker: every transfer ends well, when it is asked."""

    def __init__(self) -> None:
        self._loading: list[str] = []
        self._saved: dict[int, int] = {}

    def take(self, meta: Any) -> None:
        self._loading += [job.req_id for job in meta.load_jobs.values()]
        self._saved |= dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1)

    def report(self, requests: dict[str, Any]) -> dict[str, Any]:
        return reported(self, requests, "offloading.common", "completed_jobs")


def reported(
    worker: StoreWorker | OffloadingWorker,
    requests: dict[str, Any],
    module: str,
    field: str,
) -> dict[str, Any]:
    """Fields of KVConnectorOutput: all that the worker has in hand has ended."""
    received = {
        name
        for name in worker._loading
        if name in requests and not is_running(requests[name])
    }
    sent = {
        name
        for name, request in requests.items()
        if request.is_finished() and name not in received
    }
    found: dict[str, Any] = {"finished_recving": received, "finished_sending": sent}
    common = importlib.import_module(f"{V1}.{module}")
    for kind in ("MooncakeStoreWorkerMetadata", "OffloadingWorkerMetadata"):
        if worker._saved and hasattr(common, kind):
            meta = getattr(common, kind)(**{field: dict(worker._saved)})
            found["kv_connector_worker_meta"] = meta
    worker._loading, worker._saved = [], {}
    return found


def is_running(request: Any) -> bool:
    """Then its load was a part of the step, and nothing is said about it."""
    return request.status.name == "RUNNING"


STORE = Subject(
    patch="mooncake_store_pending_loads",
    module=f"{V1}.mooncake.store.scheduler",
    scheduler="MooncakeStoreScheduler",
    connector_module=f"{V1}.mooncake.store.connector",
    connector="MooncakeStoreConnector",
    kv_transfer={"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
    worker=StoreWorker,
    client=("LookupKeyClient", StoreLookup),
)
OFFLOADING = Subject(
    patch="offloading_new_hashes_only",
    module=f"{V1}.offloading.scheduler",
    scheduler="OffloadingConnectorScheduler",
    connector_module=f"{V1}.offloading_connector",
    connector="OffloadingConnector",
    kv_transfer={
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2**27},
    },
    worker=OffloadingWorker,
)
SUBJECTS = {subject.patch: subject for subject in (STORE, OFFLOADING)}
