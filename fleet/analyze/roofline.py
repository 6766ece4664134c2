# SPDX-License-Identifier: Apache-2.0
"""The least time that prefill and decode can take on a GPU: a roofline.

    python -m fleet.analyze.roofline --model qwen3-coder-30b-a3b --gpu h20

A step takes at least max(FLOP / peak FLOP/s, bytes / HBM bandwidth) (Williams,
Waterman and Patterson 2009), with the model's FLOP and bytes counted from its config:

- FLOP of a token through the weights: 2 x the weights that it meets (of a mixture of
  experts, the experts per token), the output projection for sampled tokens only.
- FLOP of attention: 4 x layers x heads x head size for each pair of a query and a key
  that it sees (QK^T and PV, 2 FLOP per multiply-add).
- Bytes: weights read once per step (of the experts, those that n tokens meet at least
  once if they choose evenly: E (1 - (1 - k/E)^n)), the KV of the context read once per
  request, the KV of new tokens written.

No GPU reaches its roofline; that it is a bound is what makes it useful as a floor.
Exit status 0; 1 with a message when the model or the GPU is not known.
"""

from __future__ import annotations

import argparse
import sys

from fleet.analyze.hardware import GPUS, Gpu, HardwareError, Model, read_gpu
from lab.stats.markdown import number, table

PREFILL_TOKENS = (1_000, 4_000, 16_000, 32_000, 64_000)
CACHED_SHARES = (0.0, 0.9)
BATCHES = (1, 8, 32, 64)
CONTEXTS = (4_000, 16_000, 32_000, 64_000)


def prefill_ms(model: Model, gpu: Gpu, new: int, cached: int = 0) -> tuple[float, str]:
    """Least time of one prompt of `new` tokens behind `cached` cached ones."""
    pairs = new * cached + new * (new + 1) / 2
    flop = 2 * model.active * new + 2 * model.head
    flop += model.attention_flop_per_pair * pairs
    kv = (cached + new) * model.kv_bytes_per_token
    return gpu.least_ms(flop, model.weight_bytes(new) + kv)


def decode_ms(model: Model, gpu: Gpu, batch: int, context: int) -> tuple[float, str]:
    """Least time of a decode-only step, each of `batch` requests at `context`."""
    flop = batch * 2 * (model.active + model.head)
    flop += model.attention_flop_per_pair * batch * context
    kv = batch * (context + 1) * model.kv_bytes_per_token
    return gpu.least_ms(flop, model.weight_bytes(batch) + kv)


def prefill_rows(model: Model, gpu: Gpu) -> list[dict]:
    rows = []
    for share in CACHED_SHARES:
        for tokens in PREFILL_TOKENS:
            cached = int(tokens * share)
            new = tokens - cached
            ms, bound = prefill_ms(model, gpu, new, cached)
            row = {"prompt_tokens": tokens, "cached_tokens": cached, "new_tokens": new}
            row |= {"ms": ms, "us_per_new_token": ms * 1e3 / new}
            rows.append(row | {"new_tokens_per_s": new / ms * 1e3, "bound": bound})
    return rows


def decode_rows(model: Model, gpu: Gpu) -> list[dict]:
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            ms, bound = decode_ms(model, gpu, batch, context)
            row = {"batch": batch, "context_tokens": context, "step_ms": ms}
            row |= {"tokens_per_s": batch / ms * 1e3, "bound": bound}
            rows.append(row | {"fits": model.fits(gpu, batch * context)})
    return rows


def forward_parts_us(model: Model, gpu: Gpu, batch: int) -> dict[str, float]:
    """The roofline's parts, as a simulated forward takes them (us).

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
    prefill = [
        [
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            number(row["ms"]),
            number(row["us_per_new_token"]),
            number(row["new_tokens_per_s"], 0),
            row["bound"],
        ]
        for row in prefill_rows(model, gpu)
    ]
    decode = [
        [
            f"{row['context_tokens']:,}",
            f"{row['batch']}",
            number(row["step_ms"], 2),
            number(row["tokens_per_s"], 0),
            row["bound"] if row["fits"] else f"{row['bound']}, does not fit",
        ]
        for row in decode_rows(model, gpu)
    ]
    head = ["prompt tokens", "of them cached", "ms", "µs per new token"]
    head += ["new tokens/s", "bound by"]
    parts = forward_parts_us(model, gpu, batch=8)
    return "\n\n".join(
        [
            f"{gpu.name}: {gpu.peak_tflops:g} TFLOP/s dense BF16, "
            f"{gpu.bandwidth_tb_s:g} TB/s ({gpu.source}). Model: "
            f"{model.active / 1e9:.2f} billion weights met by a token, "
            f"{model.kv_bytes_per_token / 1e3:,.1f} kB of KV per token. Lower bounds.",
            table(head, prefill),
            table(
                ["context tokens", "batch", "step ms", "tokens/s", "bound by"], decode
            ),
            "Parts, for a simulated forward: reading the weights at batch 8 takes "
            f"{parts['weights']:,.0f} µs, a prefill token {parts['per_token']:.1f} µs, "
            f"a pair of query and key in prefill {parts['per_pair_prefill']:.4f} µs, "
            "a token of context in a decode step "
            f"{parts['per_context_token_decode']:.4f} µs.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.analyze.roofline",
        description="Roofline of prefill and decode.",
    )
    parser.add_argument("--model", default="qwen3-coder-30b-a3b")
    parser.add_argument("--gpu", default="h20", help=f"a name in {GPUS.name}")
    chosen = parser.parse_args(argv)
    try:
        model, gpu = Model.read(chosen.model), read_gpu(chosen.gpu)
    except HardwareError as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    print(tables(model, gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
