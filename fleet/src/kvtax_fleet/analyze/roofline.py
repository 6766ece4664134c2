# SPDX-License-Identifier: Apache-2.0
"""A model's forward on a GPU by roofline, as the table [forward] of a fleet profile.

A step takes at least max(FLOP / peak FLOP/s, bytes / HBM bandwidth) (Williams,
Waterman and Patterson 2009). FLOP and bytes are counted from the model's config.json:

- FLOP of a token through the weights: 2 x the weights that it meets (of a mixture of
  experts, the experts per token).
- FLOP of attention: 4 x layers x heads x head size for each pair of a query and a key
  that it sees (QK^T and PV, 2 FLOP per multiply-add).
- Bytes: weights read once per step (of the experts, those that n tokens meet at least
  once if they choose evenly: E (1 - (1 - k/E)^n)), the KV of the context read once per
  request.

No GPU reaches its peaks: `share` says how much of them a forward reaches.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtax.paths import CONFIGS

from kvtax_fleet.paths import CONFIGS as FLEET_CONFIGS

DTYPE_BYTES = 2
# Tokens of the step whose weights count.
BATCH_TOKENS = 8


class HardwareError(Exception):
    """A model or a GPU is not known."""

    exit_code = 2


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer in bf16. Weights are counts, not bytes.

    `shared` is what every token meets (attention, router, dense layers), `expert` one
    expert of all its layers together; `head` the output projection.
    """

    kv_bytes_per_token: int
    attention_flop_per_pair: int
    shared: int
    expert: int
    experts: int
    experts_per_token: int
    head: int

    @classmethod
    def read(cls, name: str) -> Model:
        """Read a name in configs/models/, or the path of a config.json.

        Raises HardwareError.
        """
        path = CONFIGS / "models" / f"{name}.json"
        path = path if path.exists() else Path(name)
        try:
            return cls.of(json.loads(path.read_text()))
        except (OSError, ValueError, RecursionError) as error:
            raise HardwareError(f"model {name!r}: {error}") from None
        except KeyError as error:
            raise HardwareError(f"model {name!r}: {path} has no {error}") from None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Model:
        """Count a Hugging Face config; gated MLPs (three matrices) are assumed."""
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
            kv_bytes_per_token=2 * layers * kv_heads * head_dim * DTYPE_BYTES,
            attention_flop_per_pair=4 * layers * heads * head_dim,
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

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step of `tokens` reads."""
        met = 0.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** tokens
            met = self.experts * (1 - missed)
        return (self.shared + met * self.expert + self.head) * DTYPE_BYTES


@dataclass(frozen=True)
class Gpu:
    """`peak_tflops`: dense BF16 tensor FLOP/s; `bandwidth_tb_s`: HBM, 1e12 bytes/s."""

    peak_tflops: float
    bandwidth_tb_s: float
    source: str


def read_gpu(name: str) -> Gpu:
    """Read a GPU of fleet/configs/gpus.toml. Raises HardwareError."""
    file = FLEET_CONFIGS / "gpus.toml"
    known = tomllib.loads(file.read_text())
    if name not in known:
        raise HardwareError(f"GPU {name!r}: {file.name} has {', '.join(known)}")
    return Gpu(**known[name])


def forward_us(model: Model, gpu: Gpu, share: float) -> dict[str, float]:
    """Compute the fields of [forward] at a share of the GPU's peaks."""
    flop_per_us = share * gpu.peak_tflops * 1e6
    bytes_per_us = share * gpu.bandwidth_tb_s * 1e6
    return {
        "forward_us": model.weight_bytes(BATCH_TOKENS) / bytes_per_us,
        "us_per_token": 2 * model.active / flop_per_us,
        "us_per_context_token": model.attention_flop_per_pair / flop_per_us,
        "us_per_kv_token": model.kv_bytes_per_token / bytes_per_us,
    }


def forward_table(model: str, gpu: str, share: float) -> str:
    """Format [forward] of a model on a GPU, by their names. Raises HardwareError."""
    sizes, peaks = Model.read(model), read_gpu(gpu)
    lines = [
        f"# {model} on {gpu} by roofline, at {share:.0%} of {peaks.peak_tflops:g} "
        f"TFLOP/s dense BF16 and {peaks.bandwidth_tb_s:g} TB/s,",
        f"# weights as read at {BATCH_TOKENS} tokens a step. {peaks.source}.",
        "[forward]",
    ]
    fields = forward_us(sizes, peaks, share)
    lines += [f"{name} = {us:.4g}" for name, us in fields.items()]
    return "\n".join(lines)
