# SPDX-License-Identifier: Apache-2.0
"""What the instances really have cached, going by vLLM's KV events.

vLLM's block hashes depend on its hash algorithm and seed. So blocks get keys of our
own: a chain over their token ids, written as JSON writes them, which a prompt's bytes
give without parsing a number. A map from vLLM's hash to our key serves removals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .prefix_index import PrefixIndex

EngineHash = int | bytes
_COMMA = ord(",")
_BLANKS = b" ", b"\t", b"\r", b"\n"


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that became findable; `token_ids` are theirs, `block_size` each."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are no longer findable: one of that hash, if there were several."""

    block_hashes: list[EngineHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Block(msgspec.Struct, gc=False):
    """`count` blocks of an instance have this key.

    The garbage collector need not walk them (`gc=False`): there are as many as the
    fleet has blocks.
    """

    key: int
    size: int
    count: int = 1


class Exact:
    """`instances` is their number; one is named by its place, from 0.

    `skipped` counts blocks that got no key: their parent is unknown, as after a gap, or
    something besides tokens decides what they hold (a salt, an image).
    """

    def __init__(self, instances: int) -> None:
        self._count = instances
        self._indexes: dict[int, PrefixIndex] = {}
        self._blocks: list[dict[EngineHash, _Block]] = [{} for _ in range(instances)]
        self._loras: set[str] = set()
        self.tokens = [0] * instances
        self.skipped = [0] * instances

    def cached_tokens(self, prompt: bytes, model: str) -> list[int]:
        """For each instance, the tokens of the prompt's longest cached prefix.

        `prompt` is a JSON array of token ids. At most all but the last token: vLLM
        computes at least one.
        """
        blank = any(one in prompt for one in _BLANKS)
        compact = prompt.translate(None, b"".join(_BLANKS)) if blank else prompt
        commas = np.flatnonzero(np.frombuffer(compact, np.uint8) == _COMMA)
        root = _root(model if model in self._loras else None)
        cached = [0] * self._count
        for size, index in self._indexes.items():
            keys = _keys(compact, commas[size - 1 :: size].tolist(), root)
            for instance, depth in enumerate(index.depths(keys)):
                cached[instance] = max(cached[instance], depth * size)
        return cached

    def apply(self, instance: int, events: Sequence[Event]) -> None:
        """Take over what an instance says has happened, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(instance, event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._removed(instance, block_hash)
            else:
                self.clear(instance)

    def clear(self, instance: int) -> None:
        for block in self._blocks[instance].values():
            self._indexes[block.size].discard(block.key, instance)
        self._blocks[instance].clear()
        self.tokens[instance] = 0

    def _stored(self, instance: int, event: BlockStored) -> None:
        blocks = self._blocks[instance]
        size = event.block_size
        aligned = len(event.token_ids) == len(event.block_hashes) * size
        only_tokens = not any(
            extra and tuple(extra) != (event.lora_name,)
            for extra in event.extra_keys or []
        )
        parent = blocks.get(event.parent_block_hash)
        known = event.parent_block_hash is None or parent is not None
        if not (aligned and only_tokens and known):
            self.skipped[instance] += len(event.block_hashes)
            return
        if event.lora_name is not None:
            self._loras.add(event.lora_name)
        index = self._indexes.setdefault(size, PrefixIndex(self._count))
        key = _root(event.lora_name) if parent is None else parent.key
        for place, block_hash in enumerate(event.block_hashes):
            ids = event.token_ids[place * size : (place + 1) * size]
            key = hash((key, ",".join(map(str, ids)).encode()))
            if block_hash in blocks:
                blocks[block_hash].count += 1
                continue
            blocks[block_hash] = _Block(key, size)
            index.add(key, instance)
            self.tokens[instance] += size

    def _removed(self, instance: int, block_hash: EngineHash) -> None:
        block = self._blocks[instance].get(block_hash)
        if block is None:
            return
        block.count -= 1
        if block.count == 0:
            del self._blocks[instance][block_hash]
            self._indexes[block.size].discard(block.key, instance)
            self.tokens[instance] -= block.size


def _root(lora: str | None) -> int:
    return hash(("root", lora))


def _keys(compact: bytes, ends: list[int], root: int) -> list[int]:
    """Keys of the blocks that end before the commas at `ends`."""
    keys = []
    key, start = root, 1
    for end in ends:
        key = hash((key, compact[start:end]))
        keys.append(key)
        start = end + 1
    return keys
