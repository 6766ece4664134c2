# SPDX-License-Identifier: Apache-2.0
"""Which requests may have blocks now, so that pulls never bring the engine to a stop.

A request that pulls has blocks before it runs, and cannot be preempted. vLLM 0.18.1
gives it blocks for what it pulls only, and stops looking at waiting requests at the
first that does not fit. So an engine can stand still for good, with nothing running:
when all blocks belong to requests that wait for more, or to requests behind one that
has none. Later releases guard against it; on 0.18.1 the connector must:

- Requests that pull are so few that all of them fit entirely.
- A request without blocks that does not fit lets them pass, and no other one after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class Admission:
    """Told of all that happens to requests; the scheduler's thread only."""

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
        """It has blocks now."""
        self._waiting[request.request_id] = self._needed_blocks(request)

    def end_schedule(self, running: Iterable[str]) -> None:
        """These run in the step that was just scheduled."""
        self._held_back = False
        if self._waiting:
            for request_id in running:
                self._waiting.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def _needed_blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self._block_size)
