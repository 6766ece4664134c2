# SPDX-License-Identifier: Apache-2.0
"""Settings of every vLLM that is started here, whichever connector it has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Time = Annotated[float, msgspec.Meta(ge=0)]


class Forward(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of a forward of the null model.

    A forward takes `forward_us`, plus `us_per_token` for each token of its batch, plus
    `us_per_context_token` for each token that those attend to.
    """

    forward_us: Time
    us_per_token: Time = 0
    us_per_context_token: Time = 0


class EngineSettings(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """The keys that configs/profiles/ and fleet/configs/profiles/ have in common.

    `flavour` says which environment they are for. The KV cache has `num_blocks` blocks
    of `block_size` tokens. A server is `data_parallel` engines, each with a KV cache of
    its own, of `tensor_parallel` workers. `server_args` and `server_env` are added to
    vLLM's command line and environment, `kv_transfer_config` to that of every
    connector.
    """

    flavour: Literal["cpu", "gpu"]
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    max_num_batched_tokens: Count
    max_num_seqs: Count
    tensor_parallel: Count = 1
    data_parallel: Count = 1
    server_args: list[str] = []
    server_env: dict[str, str] = {}
    kv_transfer_config: dict[str, Any] = {}
    name: str = ""

    @property
    def workers(self) -> int:
        """Settings of one server; on GPUs each has a device of its own."""
        return self.tensor_parallel * self.data_parallel


# For whoever measures or tests something else than vLLM's settings.
CPU_ENGINE = EngineSettings(
    flavour="cpu",
    num_blocks=12_000,
    block_size=16,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    max_num_seqs=64,
    server_args=["--enforce-eager"],
    server_env={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The random sampler alone would go through torch.compile: seconds per step.
        "TORCHDYNAMO_DISABLE": "1",
    },
    kv_transfer_config={"kv_buffer_device": "cpu"},
)
