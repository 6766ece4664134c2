# SPDX-License-Identifier: Apache-2.0
"""Evidence that an arm began with cold caches: a warm one makes any policy look good.

Before the first request, no instance may have counted a request or a lookup in its
prefix cache, or hold a block, and no process of an earlier run may still be there.
After the run, the record of an instance's first engine step must show no cached blocks
besides the step's own.
"""

from __future__ import annotations

from pathlib import Path

from kvtax.engine.gpus import NoGpu, visible_gpus
from kvtax.records.steps import first_step

from kvtax_fleet.records.arm import Freshness
from kvtax_fleet.records.exposition import sample_totals

# Metrics that are zero in a vLLM that has served nothing.
COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
GAUGES = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
# Memory that drivers and displays hold on an idle GPU.
IDLE_GPU_MIB = 1024


def judge(evidence: Freshness) -> None:
    """Set `fresh`, and `why` not."""
    why = []
    for name, counted in evidence.instances.items():
        why += [
            f"{name}: {metric} is missing"
            for metric in COUNTERS
            if metric not in counted
        ]
        why += [
            f"{name}: {metric} is {value:g} before the first request"
            for metric, value in counted.items()
            if value
        ]
    why += [
        f"{name}: the first step found {blocks} blocks cached"
        for name, blocks in evidence.first_step_cached_blocks.items()
        if blocks > 0
    ]
    for device, used in enumerate(evidence.gpu_used_mib or ()):
        if used > IDLE_GPU_MIB:
            why.append(f"GPU {device}: {used} MiB in use before the start")
    if evidence.survivors:
        why.append(f"processes of an earlier run are still there: {evidence.survivors}")
    if not evidence.instances:
        why.append("no instance was looked at")
    evidence.fresh, evidence.why = not why, "; ".join(why) or None


def counted(metrics: str) -> dict[str, float]:
    """Sum the counters and gauges above in the text of an instance's /metrics."""
    totals = sample_totals(metrics)
    return {name: totals[name] for name in (*COUNTERS, *GAUGES) if name in totals}


def keep_metrics(folder: Path, moment: str, texts: dict[str, str]) -> None:
    """Write the text of each instance's /metrics, by name, below `folder`."""
    (folder / "metrics").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "metrics" / f"{name}.{moment}.prom").write_text(text)


def first_step_cached_blocks(records: Path, block_tokens: int) -> int | None:
    """Read how many blocks the first step found cached, None without a step.

    Raises RecordsError.
    """
    first = first_step(records) if records.exists() else None
    return None if first is None else first.found_blocks(block_tokens)


def gpu_used_mib(gpus: int) -> list[int] | None:
    """Read the memory in use on each of the first visible GPUs; None without any."""
    try:
        return [gpu.used_mib for gpu in visible_gpus()[:gpus]]
    except NoGpu:
        return None
