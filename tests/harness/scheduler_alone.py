# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with a connector and no worker: a stand-in reports transfers."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16


class LoneScheduler:
    """A scheduler with one KV cache group of blocks of 16 tokens.

    `connectors` makes the connector from vLLM's two configs and the role. Its metadata
    goes to `played.take`; what `played.report` answers goes back after the step.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer: dict[str, Any],
        connectors: Callable[..., Any],
        played: Any,
        *,
        num_blocks: int,
        max_model_len: int,
        max_requests: int,
        max_batched_tokens: int,
    ) -> None:
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_batched_tokens,
            max_num_seqs=max_requests,
            enable_prefix_caching=True,
        ).create_engine_config()
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        if hasattr(config.cache_config, "kv_cache_layout"):
            # Later releases' engine core resolves it; any will do here.
            config.cache_config.kv_cache_layout = "LBNHC"
        cache = cache_config(config, spec, num_blocks)
        config.cache_config.num_gpu_blocks = num_blocks
        # The config is made without a connector: checks for a GPU would refuse some.
        config.kv_transfer_config = KVTransferConfig(**kv_transfer)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        with (
            set_current_vllm_config(config),
            patch.object(
                KVConnectorFactory,
                "create_connector",
                lambda config, role, kv_cache_config: connectors(
                    config, role, kv_cache_config
                ),
            ),
        ):
            self.core = Scheduler(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_SIZE,
                log_stats=False,
            )
        self._played = played
        self._ids = count()

    def add(self, prompt: list[int], output_tokens: int) -> str:
        """Queue a request that ends after exactly `output_tokens` and return its id."""
        name = str(next(self._ids))
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0, max_tokens=output_tokens, ignore_eos=True
            ),
            pooling_params=None,
            mm_features=None,
            block_hasher=self._hasher,
        )
        self.core.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.core.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, reporting: bool = True) -> Any:
        """Schedule, and report one token per request whose prompt is computed.

        The worker reports what it has finished, unless it is told to wait. Returns
        what was scheduled.
        """
        output = self.core.schedule()
        self._played.take(output.kv_connector_metadata)
        names = list(output.num_scheduled_tokens)
        requests = [self.core.requests[name] for name in names]
        sampled = [
            [1] if request.num_computed_tokens >= request.num_tokens else []
            for request in requests
        ]
        report = self._played.report(self.core.requests) if reporting else {}
        self.core.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=KVConnectorOutput(**report) if report else None,
            ),
        )
        return output


def cache_config(config: Any, spec: FullAttentionSpec, num_blocks: int) -> Any:
    """Return the config of a cache with one layer."""
    groups = [KVCacheGroupSpec(["layer"], spec)]
    size = spec.page_size_bytes * num_blocks
    if make := getattr(kv_cache_utils, "get_kv_cache_config_from_groups", None):
        return make(config, groups, size)
    # From 0.33.0 on.
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size, ["layer"], layer_stride=size, block_stride=page)
    return KVCacheConfig(
        num_blocks,
        [tensor],
        groups,
        kv_cache_layout="LBNHC",
        hash_block_size=BLOCK_SIZE,
        cache_hit_alignment_tokens=BLOCK_SIZE,
    )


V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


@dataclass(frozen=True)
class Subject:
    """A connector under test: its patch, modules, classes and --kv-transfer-config."""

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
        """Return the --kv-transfer-config of a connector that finds nothing to load."""
        extra = self.kv_transfer.get("kv_connector_extra_config", {})
        return self.kv_transfer | {
            "kv_connector_extra_config": extra | {"test_hits": False}
        }

    def prepare(self, module: ModuleType) -> None:
        if self.client:
            setattr(module, *self.client)

    def make(self, module: ModuleType, *configs: Any) -> Any:
        """Make the connector with the scheduler's side of `module`."""
        package = importlib.import_module(self.connector_module)
        shipped = getattr(package, self.scheduler)
        setattr(package, self.scheduler, getattr(module, self.scheduler))
        try:
            return getattr(package, self.connector)(*configs)
        finally:
            setattr(package, self.scheduler, shipped)


class StoreLookup:
    """Stand-in for MooncakeStore's lookup client that answers at once.

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
    """Stand-in for MooncakeStore's worker: every load and save succeeds."""

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
    """Stand-in for Offloading's worker: every transfer succeeds."""

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
    """Return fields of KVConnectorOutput that report all transfers as finished."""
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
    fields: dict[str, Any] = {"finished_recving": received, "finished_sending": sent}
    common = importlib.import_module(f"{V1}.{module}")
    for kind in ("MooncakeStoreWorkerMetadata", "OffloadingWorkerMetadata"):
        if worker._saved and hasattr(common, kind):
            meta = getattr(common, kind)(**{field: dict(worker._saved)})
            fields["kv_connector_worker_meta"] = meta
    worker._loading, worker._saved = [], {}
    return fields


def is_running(request: Any) -> bool:
    """Return whether the request runs: its load was a part of the step."""
    return bool(request.status.name == "RUNNING")


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
