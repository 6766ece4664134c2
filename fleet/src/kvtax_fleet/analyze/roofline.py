# SPDX-License-Identifier: Apache-2.0
"""The least time that prefill and decode can take on a GPU: a roofline.

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
from itertools import product
from pathlib import Path

from kvtax.paths import CONFIGS
from kvtax.report.markdown import number, table

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

    def fits(self, gpu: Gpu, kv_tokens: int) -> bool:
        """Return whether all weights and the KV of `kv_tokens` fit the GPU's memory."""
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
    """Read a GPU of gpus.toml. Raises HardwareError."""
    known = tomllib.loads(GPUS.read_text())
    if name not in known:
        raise HardwareError(f"GPU {name!r}: {GPUS.name} has {', '.join(known)}")
    return Gpu(name=name, **known[name])


PREFILL_TOKENS = (1_000, 4_000, 16_000, 32_000, 64_000)
CACHED_SHARES = (0.0, 0.9)
BATCHES = (1, 8, 32, 64)
CONTEXTS = (4_000, 16_000, 32_000, 64_000)


def prefill_ms(model: Model, gpu: Gpu, new: int, cached: int = 0) -> tuple[float, str]:
    """Least time of one prompt of `new` tokens behind `cached` cached ones."""
    pairs = new * cached + new * (new + 1) / 2
    flop: float = 2 * model.active * new + 2 * model.head
    flop += model.attention_flop_per_pair * pairs
    kv = (cached + new) * model.kv_bytes_per_token
    return gpu.least_ms(flop, model.weight_bytes(new) + kv)


def decode_ms(model: Model, gpu: Gpu, batch: int, context: int) -> tuple[float, str]:
    """Least time of a decode-only step, each of `batch` requests at `context`."""
    flop = batch * 2 * (model.active + model.head)
    flop += model.attention_flop_per_pair * batch * context
    kv = batch * (context + 1) * model.kv_bytes_per_token
    return gpu.least_ms(flop, model.weight_bytes(batch) + kv)


def prefill_rows(model: Model, gpu: Gpu) -> list[list[str]]:
    rows = []
    for share, tokens in product(CACHED_SHARES, PREFILL_TOKENS):
        cached = int(tokens * share)
        new = tokens - cached
        ms, bound = prefill_ms(model, gpu, new, cached)
        times = number(ms), number(ms * 1e3 / new), number(new / ms * 1e3, 0)
        rows.append([f"{tokens:,}", f"{cached:,}", *times, bound])
    return rows


def decode_rows(model: Model, gpu: Gpu) -> list[list[str]]:
    rows = []
    for context, batch in product(CONTEXTS, BATCHES):
        ms, bound = decode_ms(model, gpu, batch, context)
        if not model.fits(gpu, batch * context):
            bound += ", does not fit"
        times = number(ms, 2), number(batch / ms * 1e3, 0)
        rows.append([f"{context:,}", f"{batch}", *times, bound])
    return rows


def forward_parts_us(model: Model, gpu: Gpu, batch: int) -> dict[str, float]:
    """Split the roofline into the parts of a simulated forward (us).

    `weights`: reading the weights that a decode step of `batch` meets; `per_token`:
    the FLOP of one token; `per_pair_prefill`: of a query with a key before it;
    `per_context_token_decode`: reading one token's KV.
    """
    flop_per_us, bytes_per_us = gpu.peak_tflops * 1e6, gpu.bandwidth_tb_s * 1e6
    return {
        "weights": model.weight_bytes(batch) / bytes_per_us,
        "per_token": 2 * model.active / flop_per_us,
        "per_pair_prefill": model.attention_flop_per_pair / flop_per_us,
        "per_context_token_decode": model.kv_bytes_per_token / bytes_per_us,
    }


def tables(model: Model, gpu: Gpu) -> str:
    """Both tables as Markdown, with what they rest on."""
    head = ["prompt tokens", "of them cached", "ms", "µs per new token"]
    head += ["new tokens/s", "bound by"]
    parts = forward_parts_us(model, gpu, batch=8)
    return "\n\n".join(
        [
            f"{gpu.name}: {gpu.peak_tflops:g} TFLOP/s dense BF16, "
            f"{gpu.bandwidth_tb_s:g} TB/s ({gpu.source}). Model: "
            f"{model.active / 1e9:.2f} billion weights met by a token, "
            f"{model.kv_bytes_per_token / 1e3:,.1f} kB of KV per token. Lower bounds.",
            table(head, prefill_rows(model, gpu)),
            table(
                ["context tokens", "batch", "step ms", "tokens/s", "bound by"],
                decode_rows(model, gpu),
            ),
            "Parts, for a simulated forward: reading the weights at batch 8 takes "
            f"{parts['weights']:,.0f} µs, a prefill token {parts['per_token']:.1f} µs, "
            f"a pair of query and key in prefill {parts['per_pair_prefill']:.4f} µs, "
            "a token of context in a decode step "
            f"{parts['per_context_token_decode']:.4f} µs.",
        ]
    )
