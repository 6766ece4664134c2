# SPDX-License-Identifier: Apache-2.0
"""`/metrics`: what the engine counts, under vLLM's names."""

from __future__ import annotations

from fleet.standin.engine import Engine


def exposition(engine: Engine, model: str) -> str:
    """The counters and gauges in Prometheus' text format."""
    totals = engine.totals
    labels = f'engine="0",model_name="{model}"'
    by_source = {
        "local_compute": totals.computed_tokens,
        "local_cache_hit": totals.cached_tokens,
        "external_kv_transfer": totals.external_tokens,
    }
    gauges = {
        "num_requests_running": len(engine.running),
        "num_requests_waiting": len(engine.waiting),
        "kv_cache_usage_perc": len(engine.cache) / engine.cache.num_blocks,
    }
    counters = {
        "prefix_cache_queries_total": totals.prefix_cache_queries,
        "prefix_cache_hits_total": totals.prefix_cache_hits,
        "external_prefix_cache_hits_total": totals.external_tokens,
        "prompt_tokens_total": sum(by_source.values()),
        "generation_tokens_total": totals.generation_tokens,
    }
    lines: list[str] = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
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
