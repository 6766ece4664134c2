# SPDX-License-Identifier: Apache-2.0
"""APC twice: from the instances' own counters, and from what requests were told.

By counters: prefix-cache hit tokens / queried tokens, after - before. By usage: cached
tokens / prompt tokens of the requests that the instance served. They must agree: hits
(with those of the external cache) and cached tokens to DISAGREEMENT of the queried
tokens. vLLM looks a request up again in every step in which it waits for KV blocks, and
counts it again (seen in 0.18.1): under memory pressure the counters say too much.

An arm that computes prompts elsewhere cannot be checked this way: the instance that
computes serves requests that no client sees.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from fleet.analyze.records import ArmRun
from lab.records.exposition import cache_config, sample_totals

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
# Counters and usage may differ by this share of the queried tokens.
DISAGREEMENT = 0.01


def apc(run: ArmRun, requests: pl.DataFrame) -> dict[str, Any]:
    """{instances: {name: entry}, overall: entry} of one arm and repeat.

    `requests` are that arm's. entry: queries, hits, external_hits, apc; prompt_tokens,
    cached_tokens, apc_usage (None where no request tells); agrees (None where that
    cannot be told). A counter that went down (the instance was restarted) gives apc
    None.
    """
    offloads = requests["prefill_instance"].is_not_null().any()
    instances = {}
    for name, texts in run.counters.items():
        before, after = (sample_totals(text) for text in texts)
        own = requests.filter(pl.col("instance") == name)
        instances[name] = _entry(_delta(before, after), own, checkable=not offloads)
    sums = {
        key: sum(entry[key] or 0 for entry in instances.values())
        for key in ("queries", "hits", "external_hits")
    }
    known = bool(instances) and all(e["apc"] is not None for e in instances.values())
    overall = _entry(sums if known else None, requests, checkable=not offloads)
    return {"instances": instances, "overall": overall}


def kv_blocks(run: ArmRun) -> dict[str, int]:
    """Blocks of KV cache by instance, of those that tell."""
    told = {name: cache_config(before) for name, (before, _) in run.counters.items()}
    field = "num_gpu_blocks"
    return {name: one[field] for name, one in told.items() if field in one}


def _delta(before: dict[str, float], after: dict[str, float]) -> dict | None:
    if QUERIES not in after or HITS not in after:
        return None
    names = {"queries": QUERIES, "hits": HITS, "external_hits": EXTERNAL_HITS}
    delta = {
        key: int(after.get(name, 0) - before.get(name, 0))
        for key, name in names.items()
    }
    return delta if min(delta.values()) >= 0 else None


def _entry(
    delta: dict | None, requests: pl.DataFrame, checkable: bool
) -> dict[str, Any]:
    ok = requests.filter(pl.col("status") == "ok")
    told = ok["cached_tokens"].drop_nulls()
    cached = int(told.sum()) if len(told) else None
    entry = {"queries": None, "hits": None, "external_hits": None} | (delta or {})
    queries = entry["queries"]
    entry["apc"] = round(entry["hits"] / queries, 5) if queries else None
    prompt = int(ok["usage_prompt_tokens"].sum() or 0)
    known = prompt > 0 and cached is not None
    entry |= {"prompt_tokens": prompt, "cached_tokens": cached}
    entry["apc_usage"] = round(cached / prompt, 5) if known else None
    entry["agrees"] = None
    if checkable and queries and cached is not None and len(told) == ok.height:
        # What the instance counted for requests that ended without usage.
        untold = requests.filter(pl.col("status") != "ok")["input_tokens"].sum() or 0
        apart = entry["hits"] + entry["external_hits"] - cached
        slack = DISAGREEMENT * queries
        entry["agrees"] = bool(-slack <= apart <= slack + untold)
    return entry
