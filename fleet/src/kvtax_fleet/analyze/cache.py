# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hits by counters and by usage, and the proxy's knowledge of them.

APC by counters: prefix-cache hit tokens / queried tokens, after - before. By usage:
cached tokens / prompt tokens of the requests that the instance served. They must agree:
hits (with those of the external cache) and cached tokens to DISAGREEMENT of the queried
tokens. vLLM looks a request up again in every step in which it waits for KV blocks, and
counts it again (seen in 0.18.1): under memory pressure the counters are too high. An
arm that computes prompts elsewhere cannot be checked this way: the instance that
computes serves requests that no client sees.

Belief: cached tokens of the prompt at the chosen instance, in the proxy's recorded
snapshot, against cached tokens in the usage of the same request. Requests whose prompt
came from elsewhere are left out, as the server counts received tokens as cached.

Mirror: the cache state that the proxy infers from its own decisions. A proxy that
follows its instances' KV events has the exact state, too; breakdown.json compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl
from kvtax.records import RecordsError

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.records.decisions import Breakdown
from kvtax_fleet.records.exposition import cache_config, sample_totals

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
# Counters and usage may differ by this share of the queried tokens.
DISAGREEMENT = 0.01


class ApcEntry(msgspec.Struct):
    """Hits of one instance, or of all.

    The counters' fields are null if one is missing or went down (the instance was
    restarted), those of the usage if no request has any.
    """

    queries: int | None
    """Prompt tokens that were looked up."""
    hits: int | None
    """Those found in the prefix cache."""
    external_hits: int | None
    """Those found by the connector."""
    apc: float | None
    """By counters."""
    prompt_tokens: int
    """Prompt tokens by usage."""
    cached_tokens: int | None
    """Those of them that were cached, by usage."""
    apc_usage: float | None
    """By usage."""
    agrees: bool | None
    """Whether counters and usage agree; null if that cannot be checked."""


class Apc(msgspec.Struct):
    """Hits of an arm in one repeat."""

    instances: dict[str, ApcEntry]
    """By name."""
    overall: ApcEntry
    """All instances together."""


class Belief(msgspec.Struct):
    """Error of the proxy's belief, belief - truth; shares are of the `n` requests."""

    n: int
    """Requests for which belief and truth are known."""
    exact: float
    """Share within one block."""
    too_high: float
    """Share more than one block above."""
    too_low: float
    """Share more than one block below."""
    mean_error_tokens: float
    """Mean of belief - truth."""
    mean_abs_error_tokens: float
    """Mean of its size."""
    p99_abs_error_tokens: float
    """99th percentile of its size."""


class MirrorDifference(msgspec.Struct):
    """Difference between the proxy's mirror and the exact state, over all instances."""

    prompts: int
    """Prompts that were compared."""
    mean_difference_tokens: float
    """Mean of |mirror - exact| over the prompts, at the instance of each."""
    held_difference_tokens: int | None
    """Mirror - exact of all cached after the last request; null if not counted."""


class _Counted(NamedTuple):
    """Rise of an instance's counters."""

    queries: int
    hits: int
    external_hits: int


def apc(run: ArmRun, requests: pl.DataFrame) -> Apc:
    """Compute the hits of one arm and repeat; `requests` are its own."""
    offloads = requests["prefill_instance"].is_not_null().any()
    instances = {}
    for name, texts in run.counters.items():
        before, after = (sample_totals(text) for text in texts)
        own = requests.filter(pl.col("instance") == name)
        instances[name] = _entry(_delta(before, after), own, checkable=not offloads)
    sums = _Counted(
        sum(entry.queries or 0 for entry in instances.values()),
        sum(entry.hits or 0 for entry in instances.values()),
        sum(entry.external_hits or 0 for entry in instances.values()),
    )
    known = bool(instances) and all(e.apc is not None for e in instances.values())
    overall = _entry(sums if known else None, requests, checkable=not offloads)
    return Apc(instances, overall)


def kv_blocks(run: ArmRun) -> dict[str, int]:
    """Read the blocks of KV cache of each instance that reports them."""
    configs = {name: cache_config(before) for name, (before, _) in run.counters.items()}
    field = "num_gpu_blocks"
    return {name: config[field] for name, config in configs.items() if field in config}


def _delta(before: dict[str, float], after: dict[str, float]) -> _Counted | None:
    if QUERIES not in after or HITS not in after:
        return None
    names = QUERIES, HITS, EXTERNAL_HITS
    delta = _Counted(*(int(after.get(n, 0) - before.get(n, 0)) for n in names))
    return delta if min(delta) >= 0 else None


def _entry(
    counted: _Counted | None, requests: pl.DataFrame, checkable: bool
) -> ApcEntry:
    ok = requests.filter(pl.col("status") == "ok")
    known = ok["cached_tokens"].drop_nulls()
    cached = int(known.sum()) if len(known) else None
    prompt = int(ok["usage_prompt_tokens"].sum() or 0)
    queries, hits, external_hits = counted or (None, None, None)
    agrees = None
    everyone_tells = cached is not None and len(known) == ok.height
    if checkable and counted and counted.queries and everyone_tells:
        # The instance also counted requests that ended without usage.
        lost = int(requests.filter(pl.col("status") != "ok")["input_tokens"].sum())
        apart = counted.hits + counted.external_hits - (cached or 0)
        slack = DISAGREEMENT * counted.queries
        agrees = bool(-slack <= apart <= slack + lost)
    return ApcEntry(
        queries=queries,
        hits=hits,
        external_hits=external_hits,
        apc=round(counted.hits / queries, 5) if counted and queries else None,
        prompt_tokens=prompt,
        cached_tokens=cached,
        apc_usage=None if cached is None or not prompt else round(cached / prompt, 5),
        agrees=agrees,
    )


def belief(requests: pl.DataFrame, block_tokens: int) -> Belief | None:
    """Measure the error of the belief; None without a pair of belief and truth."""
    known = requests.filter(
        pl.col("believed_cached").is_not_null()
        & pl.col("cached_tokens").is_not_null()
        & pl.col("prefill_instance").is_null()
        & (pl.col("status") == "ok")
    )
    if known.is_empty():
        return None
    error = (known["believed_cached"] - known["cached_tokens"]).to_numpy().astype(float)
    off = np.abs(error) > block_tokens
    return Belief(
        n=known.height,
        exact=round(float((~off).mean()), 5),
        too_high=round(float((off & (error > 0)).mean()), 5),
        too_low=round(float((off & (error < 0)).mean()), 5),
        mean_error_tokens=round(float(error.mean()), 2),
        mean_abs_error_tokens=round(float(np.abs(error).mean()), 2),
        p99_abs_error_tokens=round(float(np.quantile(np.abs(error), 0.99)), 1),
    )


def mirror_against_exact(folder: Path) -> MirrorDifference | None:
    """Compare mirror and exact state, from breakdown.json.

    None without the file, or a prompt that was compared. Raises RecordsError.
    """
    path = folder / "breakdown.json"
    if not path.exists():
        return None
    try:
        breakdown = msgspec.json.decode(path.read_bytes(), type=Breakdown)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordsError(f"{path}: {error}") from None
    caches = [entry.cache for entry in breakdown.instances.values()]
    prompts = sum(cache.compared_prompts or 0 for cache in caches)
    if prompts == 0:
        return None
    compared = [cache for cache in caches if cache.compared_prompts]
    held = [cache.mirror_minus_exact_tokens for cache in caches]
    apart = sum(
        (c.mean_difference_tokens or 0) * (c.compared_prompts or 0) for c in compared
    )
    return MirrorDifference(
        prompts=prompts,
        mean_difference_tokens=round(apart / prompts, 2),
        held_difference_tokens=None if None in held else sum(h or 0 for h in held),
    )
