# SPDX-License-Identifier: Apache-2.0
"""An instance's /metrics in Prometheus' text format: written as vLLM does, and read."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class Totals(msgspec.Struct):
    """Counters since the start.

    Prompt tokens, of all three kinds, count once a request gets its first token.
    """

    computed_tokens: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: int = 0
    aborted: int = 0


class Gauges(msgspec.Struct):
    """Present state; `usage` is the share of the KV blocks that is in use."""

    running: int
    waiting: int
    usage: float


def exposition(totals: Totals, gauges: Gauges, model: str) -> str:
    """Format both in Prometheus' text format."""
    labels = f'engine="0",model_name="{model}"'
    by_source = {
        "local_compute": totals.computed_tokens,
        "local_cache_hit": totals.cached_tokens,
        "external_kv_transfer": totals.external_tokens,
    }
    now = {
        "num_requests_running": gauges.running,
        "num_requests_waiting": gauges.waiting,
        "kv_cache_usage_perc": gauges.usage,
    }
    counters = {
        "prefix_cache_queries_total": totals.prefix_cache_queries,
        "prefix_cache_hits_total": totals.prefix_cache_hits,
        "external_prefix_cache_hits_total": totals.external_tokens,
        "prompt_tokens_total": sum(by_source.values()),
        "generation_tokens_total": totals.generation_tokens,
    }
    lines: list[str] = []
    for kind, values in (("gauge", now), ("counter", counters)):
        for name, value in values.items():
            lines += [f"# TYPE vllm:{name.removesuffix('_total')} {kind}"]
            lines += [f"vllm:{name}{{{labels}}} {float(value)}"]
    lines.append("# TYPE vllm:prompt_tokens_by_source counter")
    for source, tokens in by_source.items():
        label = f'{labels},source="{source}"'
        lines.append(f"vllm:prompt_tokens_by_source_total{{{label}}} {float(tokens)}")
    reasons = {"length": totals.finished, "abort": totals.aborted}
    lines.append("# TYPE vllm:request_success counter")
    for reason, requests in reasons.items():
        label = f'{labels},finished_reason="{reason}"'
        lines.append(f"vllm:request_success_total{{{label}}} {float(requests)}")
    return "\n".join(lines) + "\n"


def cache_config(text: str) -> dict[str, int]:
    """Read the whole numbers in vLLM's description of an engine's KV cache.

    Among them are `block_size`, in tokens, and `num_gpu_blocks`; empty where it tells
    nothing.
    """
    for family in text_string_to_metric_families(text):
        if family.name == "vllm:cache_config_info":
            labels = family.samples[0].labels.items()
            return {name: int(value) for name, value in labels if value.isdigit()}
    return {}


def sample_totals(text: str) -> dict[str, float]:
    """Sum up every sample in `text` over its labels, by the sample's name."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
