# SPDX-License-Identifier: Apache-2.0
"""Which requests may have blocks now, so that pulls never bring the engine to a stop.

A request that pulls gets its blocks before it runs, and cannot be preempted. vLLM
0.18.1 gives it only the blocks for what it pulls, and looks at waiting requests only
up to the first that does not fit. So an engine can stop for good, with nothing
running, when all blocks belong to requests that wait for more blocks, or to requests
queued behind one that has none. Later releases prevent this; on 0.18.1 the connector
must, by two rules:

- Only so many requests pull at a time that all of them fit, with the rest of their
  blocks.
- A request without blocks that does not fit lets those that have blocks pass, and no
  other request after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class Admission:
    """Is told everything that happens to requests, in the scheduler's thread only."""

    def __init__(self, block_pool: BlockPool, block_size: int) -> None:
        self._pool = block_pool
        self._block_size = block_size
        # One block is never given out.
        self._usable_blocks = block_pool.num_gpu_blocks - 1
        # Requests that have pulled blocks and have not run yet, and what they need.
        self._waiting: dict[str, int] = {}
        self._held_back = False

    def admits(self, request: Request, pulls: bool) -> bool:
        """Whether it may have blocks in this schedule(); asked in the queue's order."""
        # It has none any more if nothing of its pull is of use.
        self._waiting.pop(request.request_id, None)
        if self._held_back:
            return False
        if self._waiting:
            needed = self._needed_blocks(request)
            self._held_back = needed > self._pool.get_num_free_blocks() or (
                pulls and needed + sum(self._waiting.values()) > self._usable_blocks
            )
        return not self._held_back

    def pulls(self, request: Request) -> None:
        """The request has blocks now."""
        self._waiting[request.request_id] = self._needed_blocks(request)

    def end_schedule(self, running: Iterable[str]) -> None:
        """The requests `running` are part of the step that was just scheduled."""
        self._held_back = False
        if self._waiting:
            for request_id in running:
                self._waiting.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def _needed_blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self._block_size)
