# SPDX-License-Identifier: Apache-2.0
"""What block_pool_delta_listener is tested with, known by name without vLLM.

CASES are the functions of listener_cases.py. MUTANTS are what could be wrong with the
patch: every block is left out once, and each of the others replaces a text of the
patched files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import blockpatch
from blockpatch.blocks import parse, render
from lab.paths import PATCHES

PATCH = blockpatch.load_patches(PATCHES)["block_pool_delta_listener"]


class Mutant(NamedTuple):
    """`edit` is made to the file: "pool" (block_pool.py) or "listener"."""

    file: str
    edit: Callable[[str], str]


def leave_out(block_id: str, text: str) -> str:
    lines, blocks = parse(text.encode())
    kept = [block for block in blocks if block.name != f"{PATCH.name}:{block_id}"]
    assert len(kept) == len(blocks) - 1
    return render(lines, kept).decode()


def replace(old: str, new: str, text: str) -> str:
    assert text.count(old) == 1, f"{text.count(old)} times in the file: {old!r}"
    return text.replace(old, new)


REPLACED = {
    "snapshot left out": (
        "pool",
        "for key, blocks in self._cache.items():",
        "for key, blocks in {}.items():",
    ),
    "snapshot of one of several blocks with a key": (
        "pool",
        "for block_id in blocks:\n",
        "for block_id in [*blocks][:1]:\n",
    ),
    "snapshot told, but nothing after": (
        "pool",
        "    self.listeners.append(listener)",
        "    pass",
    ),
    "only one listener": (
        "pool",
        "    self.listeners.append(listener)",
        "    self.listeners[:] = [listener]",
    ),
    "one list of listeners for all pools": (
        "pool",
        "self.listeners: list[BlockPoolListener] = []",
        "self.listeners = type(self).__dict__.get('all') or []\n"
        "        type(self).all = self.listeners",
    ),
    "reset loses the listeners": (
        "pool",
        "self.cached_block_hash_to_block.listeners = listeners",
        "pass",
    ),
    "reset not told": (
        "pool",
        "    listener.on_cache_reset()",
        "    pass",
    ),
    "an eviction told that was none": (
        "pool",
        "if self.listeners and block is not None:",
        "if self.listeners:",
    ),
    "cached not noted": (
        "listener",
        "block_id: int) -> None:\n        self._changed.add(key)\n\n",
        "block_id: int) -> None:\n        pass\n\n",
    ),
    "evicted not noted": (
        "listener",
        "block_id: int) -> None:\n        self._changed.add(key)\n        #",
        "block_id: int) -> None:\n        #",
    ),
    "no bound": (
        "listener",
        "if len(self._changed) > self._max_changed:",
        "if False:",
    ),
    "overflow drops the changes": (
        "listener",
        "            self.on_cache_reset()",
        "            self._changed.clear()",
    ),
    "reset not noted": (
        "listener",
        "        self._cleared = True",
        "        pass",
    ),
    "reset keeps what was noted before": (
        "listener",
        "        self._changed.clear()\n        self._cleared = True",
        "        self._cleared = True",
    ),
    "changes taken again": (
        "listener",
        "        self._changed.clear()\n        self._cleared = False",
        "        self._cleared = False",
    ),
    "reset taken again": (
        "listener",
        "        self._cleared = False\n        return",
        "        return",
    ),
    "the copy after a reset left out": (
        "listener",
        "for key in block_map.keys() if self._cleared else self._changed:",
        "for key in self._changed:",
    ),
    "all of the cache shipped each time": (
        "listener",
        "for key in block_map.keys() if self._cleared else self._changed:",
        "for key in {**block_map._cache, **dict.fromkeys(self._changed)}:",
    ),
    "never nothing to tell": (
        "listener",
        "if not (self._changed or self._cleared):",
        "if False:",
    ),
    "old keys kept at a reset": (
        "listener",
        "            block_ids.clear()",
        "            pass",
    ),
    "evicted keys kept": (
        "listener",
        "            block_ids.pop(key, None)",
        "            pass",
    ),
    "moved keys kept": (
        "listener",
        "        block_ids.update(self.cached)",
        "        block_ids |= self.cached | block_ids",
    ),
}

MUTANTS: dict[str, Mutant] = {
    f"without {block.id}": Mutant("pool", partial(leave_out, block.id))
    for block in PATCH.blocks
} | {
    name: Mutant(file, partial(replace, old, new))
    for name, (file, old, new) in REPLACED.items()
}

CASES = [
    "each_block_is_told_once_when_cached_and_once_when_evicted",
    "all_subscribers_hear_the_same_in_the_same_order",
    "a_late_listener_first_receives_everything_already_cached",
    "listeners_of_one_pool_hear_nothing_of_another",
    "without_prefix_caching_no_block_is_told",
    "a_reset_is_told_and_subscribers_outlive_it",
    "a_refused_reset_is_not_told",
    "nothing_changed_is_none_and_a_change_is_taken_once",
    "what_comes_and_goes_between_takes_is_not_shipped_as_cached",
    "a_key_cached_again_in_another_block_is_what_only_the_walk_misses",
    "of_two_blocks_with_a_key_an_evicted_one_is_what_only_the_walk_misses",
    "a_tracker_that_is_never_taken_holds_three_pools_of_keys_at_most",
]
