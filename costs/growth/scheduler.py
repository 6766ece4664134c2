# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with a connector and no worker: the caller plays the worker."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16


class LoneScheduler:
    """One KV cache group of blocks of 16 tokens.

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
        cache = get_kv_cache_config_from_groups(
            config,
            [KVCacheGroupSpec(["layer"], spec)],
            spec.page_size_bytes * num_blocks,
        )
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
        """Queue a request that ends after exactly `output_tokens`; its id."""
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
        """Schedule, and answer with one token per request whose prompt is computed.

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
