# SPDX-License-Identifier: Apache-2.0
"""The null model: zeros for every token, after a sleep that stands for the GPU."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import (
    maybe_transfer_kv_layer,
)

from kvtax_null_model.forward import SimulatedForward


@maybe_transfer_kv_layer
def null_attention(layer_name: str) -> None:
    """Computes nothing; the connector is called around it, as around any attention."""


class NullForCausalLM(nn.Module):
    """Returns zero hidden states [tokens, hidden_size], so greedy tokens are 0.

    The null_* entries of the checkpoint's config.json are SimulatedForward's.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        cost = {
            name: getattr(config, f"null_{name}", 0)
            for name in ("forward_us", "us_per_token", "us_per_context_token")
        }
        self.simulated = SimulatedForward(**cost) if any(cost.values()) else None
        names = [f"layers.{i}.attention" for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(
            Attention(
                num_heads=config.num_attention_heads,
                head_size=config.head_dim,
                scale=1.0,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                prefix=name,
                kv_sharing_target_layer_name=None if name == names[0] else names[0],
            )
            for name in names
        )
        self.layer_names = names
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        max_requests = vllm_config.scheduler_config.max_num_seqs
        dtype = vllm_config.model_config.dtype
        self.hidden = torch.zeros(max_tokens, config.hidden_size, dtype=dtype)
        self.logits = torch.zeros(max_requests, config.vocab_size, dtype=dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.hidden[: input_ids.shape[0]]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors=None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        for name in self.layer_names:
            null_attention(name)
        if self.simulated is not None:
            self.simulated.wait(positions)
        return self.hidden[: positions.shape[0]]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits[: hidden_states.shape[0]]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()
