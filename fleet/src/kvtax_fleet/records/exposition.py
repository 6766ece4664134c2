# SPDX-License-Identifier: Apache-2.0
"""An instance's /metrics in Prometheus' text format, as metrics/*.prom keep it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


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
