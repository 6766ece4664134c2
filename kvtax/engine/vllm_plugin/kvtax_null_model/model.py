# SPDX-License-Identifier: Apache-2.0
"""The null model: zeros for every token, after a sleep that stands for the GPU."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.kv_transfer_utils import (
    maybe_transfer_kv_layer,
)

from kvtax_null_model.forward import SimulatedForward

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata

    from kvtax_null_model.device import NullDevice


@maybe_transfer_kv_layer
def null_attention(layer_name: str) -> None:
    """Compute nothing; the connector is called around it, as around any attention."""


class BorrowingLayer:
    """A layer of the forward context with the KV cache of another layer.

    vLLM allocates nothing for it. Its own sharing of caches is not an option, as
    NixlConnector cannot register a layer that has no cache of its own.
    """

    def __init__(self, owner: Attention) -> None:
        self._owner = owner

    @property
    def kv_cache(self) -> list[torch.Tensor]:
        return self._owner.kv_cache


class NullForCausalLM(nn.Module):
    """Returns zero hidden states [tokens, hidden_size], so greedy tokens are 0.

    The null_* entries of the checkpoint's config.json are SimulatedForward's.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        cost = {
            name: getattr(config, f"null_{name}", 0) for name in SimulatedForward.COSTS
        }
        counted = get_tensor_model_parallel_rank() == 0
        self.simulated: SimulatedForward | NullDevice | None = (
            SimulatedForward(**cost, counted=counted) if any(cost.values()) else None
        )
        ranks = get_tensor_model_parallel_world_size()
        names = [f"layers.{i}.attention" for i in range(config.num_hidden_layers)]
        self.attention = Attention(
            num_heads=config.num_attention_heads // ranks,
            head_size=config.head_dim,
            scale=1.0,
            num_kv_heads=config.num_key_value_heads // ranks,
            cache_config=vllm_config.cache_config,
            prefix=names[0],
        )
        layers = vllm_config.compilation_config.static_forward_context
        layers |= {name: BorrowingLayer(self.attention) for name in names[1:]}
        self.layer_names = names
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        max_requests = vllm_config.scheduler_config.max_num_seqs
        # vLLM has made a dtype of whatever name was given.
        dtype = cast(torch.dtype, vllm_config.model_config.dtype)
        self.hidden = torch.zeros(max_tokens, config.hidden_size, dtype=dtype)
        self.logits = torch.zeros(max_requests, config.vocab_size, dtype=dtype)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.hidden[: input_ids.shape[0]]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        self.transfer_layers()
        if self.simulated is not None:
            self.simulated.wait(positions)
        return self.hidden[: positions.shape[0]]

    def transfer_layers(self) -> None:
        """Make the connector's calls of each layer."""
        # A list only where a batch is run in halves, which the null model's is not.
        attn_metadata: dict[str, AttentionMetadata] | None
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is not None:
            shared = attn_metadata[self.layer_names[0]]
            attn_metadata |= dict.fromkeys(self.layer_names, shared)
        for name in self.layer_names:
            null_attention(name)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits[: hidden_states.shape[0]]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()
