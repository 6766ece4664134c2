# SPDX-License-Identifier: Apache-2.0
"""Settings of direct reads, and the configurations that they refuse."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from connectors.direct_read.protocol import MIN_SECRET_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SECRET_VARIABLE = "DIRECT_READ_SECRET"
HOST_VARIABLE = "DIRECT_READ_HOST"
PORT_VARIABLE = "DIRECT_READ_PORT"
OPTIONS = {"host", "port", "mooncake_protocol"}


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    `kv_connector_extra_config` has `host` and `port`, where the side channel
    listens (the environment's DIRECT_READ_HOST, or 127.0.0.1, unless set; its
    DIRECT_READ_PORT, or any free one, unless set; with data parallelism each engine
    takes the port plus its rank), and `mooncake_protocol` (rdma unless set). The
    secret, which all peers share, comes from the environment: what is in the config
    gets logged.
    """

    host: str
    port: int
    protocol: str
    secret: bytes
    serves: bool
    pulls: bool

    @classmethod
    def of(
        cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
    ) -> "Settings":
        """Read the settings. Raises ValueError with the change that is needed."""
        if reason := _refusal(vllm_config, kv_cache_config):
            raise ValueError(f"DirectReadConnector: {reason}")
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        port = int(extra.get("port", os.environ.get(PORT_VARIABLE) or 0))
        if port:
            port += vllm_config.parallel_config.data_parallel_index
        return cls(
            host=extra.get("host", os.environ.get(HOST_VARIABLE) or "127.0.0.1"),
            port=port,
            protocol=extra.get("mooncake_protocol", "rdma"),
            secret=os.environ[SECRET_VARIABLE].encode(),
            serves=transfer.is_kv_producer,
            pulls=transfer.is_kv_consumer,
        )


def _refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    transfer = vllm_config.kv_transfer_config
    if unknown := set(transfer.kv_connector_extra_config) - OPTIONS:
        return (
            f"kv_connector_extra_config has {', '.join(sorted(unknown))}; "
            f"it takes {', '.join(sorted(OPTIONS))}"
        )
    if transfer.kv_load_failure_policy != "recompute":
        return (
            'set kv_load_failure_policy to "recompute" in kv_transfer_config: '
            "otherwise a block that the peer evicts during a read ends the request"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, set --enable-prefix-caching"
    if len(os.environ.get(SECRET_VARIABLE, "").encode()) < MIN_SECRET_BYTES:
        return (
            f"set the environment variable {SECRET_VARIABLE} to a secret of at "
            f"least {MIN_SECRET_BYTES} bytes, the same on all peers"
        )
    if os.environ.get("PYTHONHASHSEED") is None:
        return (
            "set the environment variable PYTHONHASHSEED, the same on all peers: "
            "without it their block hashes never agree"
        )
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported, take out --speculative-config"
    if vllm_config.scheduler_config.policy != "fcfs":
        return (
            "set --scheduling-policy to fcfs: with others a request can be preempted "
            "in the step that publishes its blocks, and these are never written"
        )
    if vllm_config.cache_config.calculate_kv_scales:
        return (
            "take out --calculate-kv-scales: each instance would have scales of its own"
        )
    if vllm_config.model_config.enable_sleep_mode:
        return "take out --enable-sleep-mode: peers read memory that must stay there"
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name) > 1:
            return f"set {name} to 1, others are not supported"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"the model has {len(groups)} KV cache groups, only one is supported; "
            "set --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return (
            f"the model's KV cache is {type(spec).__name__}, only FullAttentionSpec "
            "is supported; take DirectReadConnector out of kv_transfer_config"
        )
    return None
