# SPDX-License-Identifier: Apache-2.0
"""The least times of a forward's parts on a GPU: a roofline.

A step takes at least max(FLOP / peak FLOP/s, bytes / HBM bandwidth) (Williams,
Waterman and Patterson 2009), with the model's FLOP and bytes counted from its
config.json, and peaks as the vendor publishes them (gpus.toml):

- FLOP of a token through the weights: 2 x the weights that it meets (of a mixture of
  experts, the experts per token), the output projection for sampled tokens only.
- FLOP of attention: 4 x layers x heads x head size for each pair of a query and a key
  that it sees (QK^T and PV, 2 FLOP per multiply-add).
- Bytes: weights read once per step (of the experts, those that n tokens meet at least
  once if they choose evenly: E (1 - (1 - k/E)^n)), the KV of the context read once per
  request, the KV of new tokens written.

No GPU reaches its roofline; that it is a bound is what makes it useful as a floor.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvtax.paths import CONFIGS

MODELS = CONFIGS / "models"
GPUS = Path(__file__).with_name("gpus.toml")
DTYPE_BYTES = 2


class HardwareError(Exception):
    """A model or a GPU is not known."""

    exit_code = 2


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


@dataclass(frozen=True)
class Gpu:
    """`peak_tflops`: dense BF16 tensor FLOP/s; `bandwidth_tb_s`: HBM, 1e12 bytes/s."""

    name: str
    peak_tflops: float
    bandwidth_tb_s: float
    source: str


def read_gpu(name: str) -> Gpu:
    """Read a GPU of gpus.toml. Raises HardwareError."""
    known = tomllib.loads(GPUS.read_text())
    if name not in known:
        raise HardwareError(f"GPU {name!r}: {GPUS.name} has {', '.join(known)}")
    return Gpu(name=name, **known[name])


def forward_parts_us(model: Model, gpu: Gpu, batch: int) -> dict[str, float]:
    """Compute the least times of a simulated forward's parts."""
    flop_per_us, bytes_per_us = gpu.peak_tflops * 1e6, gpu.bandwidth_tb_s * 1e6
    return {
        f"reading the weights at batch {batch}": model.weight_bytes(batch)
        / bytes_per_us,
        "a token of prefill": 2 * model.active / flop_per_us,
        "a pair of query and key in prefill": model.attention_flop_per_pair
        / flop_per_us,
        "a token of context in a decode step": model.kv_bytes_per_token / bytes_per_us,
    }


def forward_text(model: Model, gpu: Gpu) -> str:
    """Format the parts, with what they rest on."""
    lines = [
        f"{gpu.name}: {gpu.peak_tflops:g} TFLOP/s dense BF16, "
        f"{gpu.bandwidth_tb_s:g} TB/s ({gpu.source}). Model: "
        f"{model.active / 1e9:.2f} billion weights met by a token, "
        f"{model.kv_bytes_per_token / 1e3:,.1f} kB of KV per token. Lower bounds, us:"
    ]
    parts = forward_parts_us(model, gpu, batch=8)
    return "\n".join(lines + [f"{us:12,.4f}  {part}" for part, us in parts.items()])
