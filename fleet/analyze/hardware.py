# SPDX-License-Identifier: Apache-2.0
"""What a model weighs and what a GPU can do: sizes from a config, peaks from a table.

The model's config.json gives the weights that a token meets and the KV bytes it leaves
behind; gpus.toml gives peak FLOP/s and bandwidth as the vendor publishes them.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from lab.paths import CONFIGS

MODELS = CONFIGS / "models"
GPUS = Path(__file__).with_name("gpus.toml")
DTYPE_BYTES = 2


class HardwareError(Exception):
    """A model or a GPU that is not known."""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer. Weights are counts, not bytes.

    `shared` is what every token meets (attention, router, dense layers), `expert` one
    expert of all its layers together; `head` the output projection.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    shared: int
    expert: int
    experts: int
    experts_per_token: int
    head: int

    @classmethod
    def read(cls, name: str) -> Model:
        """`name` in configs/models/, or the path of a config.json.

        Raises HardwareError.
        """
        path = MODELS / f"{name}.json"
        path = path if path.exists() else Path(name)
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise HardwareError(f"model {name!r}: {error}") from None
        except KeyError as error:
            raise HardwareError(f"model {name!r}: {path} has no {error}") from None

    @classmethod
    def of(cls, config: dict) -> Model:
        """From a Hugging Face config; gated MLPs (three matrices) are assumed."""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        head_dim = config.get("head_dim", hidden // heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        experts = config.get("num_experts", 0)
        # Without experts the one dense MLP is met by every token.
        if experts:
            dense, router = 0, hidden * experts
            expert = 3 * hidden * config["moe_intermediate_size"]
        else:
            dense, router, expert = 3 * hidden * config["intermediate_size"], 0, 0
        return cls(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            shared=layers * (attention + dense + router),
            expert=layers * expert,
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok", 0),
            head=hidden * config["vocab_size"],
        )

    @property
    def active(self) -> int:
        """Weights that one token meets, without the output projection."""
        return self.shared + self.experts_per_token * self.expert

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES

    @property
    def attention_flop_per_pair(self) -> int:
        return 4 * self.layers * self.heads * self.head_dim

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step of `tokens` reads."""
        met = 0.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** tokens
            met = self.experts * (1 - missed)
        return (self.shared + met * self.expert + self.head) * DTYPE_BYTES

    def fits(self, gpu: Gpu, kv_tokens: int) -> bool:
        """Whether all weights and the KV of `kv_tokens` fit the GPU's memory."""
        # The embedding is as large as the output projection.
        weights = self.shared + self.experts * self.expert + 2 * self.head
        nbytes = weights * DTYPE_BYTES + kv_tokens * self.kv_bytes_per_token
        return nbytes <= gpu.memory_gb * 1e9


@dataclass(frozen=True)
class Gpu:
    """`peak_tflops`: dense BF16 tensor FLOP/s; `bandwidth_tb_s`: HBM, 1e12 bytes/s."""

    name: str
    peak_tflops: float
    bandwidth_tb_s: float
    memory_gb: float
    source: str

    def least_ms(self, flop: float, nbytes: float) -> tuple[float, str]:
        """(ms, "compute" or "memory")."""
        compute = flop / (self.peak_tflops * 1e12) * 1e3
        memory = nbytes / (self.bandwidth_tb_s * 1e12) * 1e3
        return max((compute, "compute"), (memory, "memory"))


def read_gpu(name: str) -> Gpu:
    """A GPU of gpus.toml. Raises HardwareError."""
    known = tomllib.loads(GPUS.read_text())
    if name not in known:
        raise HardwareError(f"GPU {name!r}: {GPUS.name} has {', '.join(known)}")
    return Gpu(name=name, **known[name])
