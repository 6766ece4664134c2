# SPDX-License-Identifier: Apache-2.0
"""Settings of every vLLM that is started here, whichever connector it has."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvtax.records.profile import EngineSettings

Time = Annotated[float, msgspec.Meta(ge=0)]


class Forward(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of a forward of the null model.

    A forward takes `forward_us`, plus `us_per_token` for each token of its batch, plus
    `us_per_context_token` for each token that those attend to.
    """

    forward_us: Time
    us_per_token: Time = 0
    us_per_context_token: Time = 0


# Engine settings of tests and benchmarks.
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
