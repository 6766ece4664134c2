# SPDX-License-Identifier: Apache-2.0
"""breakdown.json of an arm: did the proxy's mirror agree with the exact cache state?

Only a proxy that follows its instances' KV events has both. The mirror is what it
believes from its own decisions.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lab.records import RecordsError
from lab.records.breakdown import Breakdown


def mirror_against_exact(folder: Path) -> dict[str, float | int | bool | None] | None:
    """{prompts, mean_difference_tokens, held_difference_tokens, gaps, complete}.

    Over all instances: the mean of |mirror - exact| over the prompts, at the instance
    that each was sent to, and mirror - exact of all that is cached after the last
    request (None if that is not counted). None without breakdown.json, or a prompt that
    was compared. Raises RecordsError.
    """
    path = folder / "breakdown.json"
    if not path.exists():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Breakdown)
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: {error}") from None
    caches = [one.cache for one in found.instances.values()]
    prompts = sum(cache.compared_prompts or 0 for cache in caches)
    if prompts == 0:
        return None
    compared = [cache for cache in caches if cache.compared_prompts]
    held = [cache.mirror_minus_exact_tokens for cache in caches]
    apart = sum(c.mean_difference_tokens * c.compared_prompts for c in compared)
    return {
        "prompts": prompts,
        "mean_difference_tokens": round(apart / prompts, 2),
        "held_difference_tokens": None if None in held else sum(held),
        "gaps": sum(cache.gaps or 0 for cache in caches),
        "complete": all(cache.complete for cache in caches),
    }
