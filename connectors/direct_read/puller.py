# SPDX-License-Identifier: Apache-2.0
"""Pulls blocks from peers in threads: read, go quiet, validate, report.

A pull is reported once, and only when nothing writes to its blocks any more: then
the scheduler may give them to others.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from connectors.direct_read.client import Connections
from connectors.direct_read.protocol import DirectReadError, WorkerAddress
from connectors.direct_read.reads import (
    LostTrackError,
    Region,
    TransferEngine,
    read_blocks,
)

# vLLM shows what its own loggers say.
logger = logging.getLogger("vllm.direct_read")

# Each waits for one peer; if that has stopped, up to a timeout of the transport.
NUM_THREADS = 8


@dataclass
class Pull:
    """Blocks that a request needs from a peer.

    Args:
        token: The peer's token of the offer that the blocks belong to.
        skipped: How many of the offer's blocks come before them.
        workers: Where to read from, by tensor parallel rank.
        peer_block_ids: The peer's blocks.
        block_ids: Where they go.
    """

    request_id: str
    host: str
    port: int
    token: int
    skipped: int
    workers: list[WorkerAddress]
    peer_block_ids: list[int]
    block_ids: list[int]


@dataclass
class Pulled:
    """A pull that has ended. `counts` are named as in metrics.py."""

    request_id: str
    failed_block_ids: list[int]
    counts: dict[str, int]


class Puller:
    """Reads into the memory at `ours`, for the worker of this rank.

    Its methods are for one thread.
    """

    def __init__(
        self, engine: TransferEngine, ours: WorkerAddress, rank: int, secret: bytes
    ) -> None:
        self._engine = engine
        self._ours = ours
        self._rank = rank
        self._connections = Connections(secret)
        self._executor = ThreadPoolExecutor(NUM_THREADS, "direct-read-pull")
        # Requests whose pull is under way, and those of them that nobody waits for.
        self._pulling: set[str] = set()
        self._unwanted: set[str] = set()
        self._pulled: deque[Pulled] = deque()

    def begin(self, pull: Pull, fence: Callable[[], object] = lambda: None) -> None:
        """Begin a pull, in a thread that first waits for the fence to return."""
        self._pulling.add(pull.request_id)
        self._executor.submit(self._pull, pull, fence)

    def is_busy(self) -> bool:
        """Return whether there are pulls that take_pulled has not returned yet."""
        return bool(self._pulling)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Begin no further reads for these requests. Their pulls are still reported."""
        self._unwanted.update(self._pulling.intersection(request_ids))

    def take_pulled(self) -> list[Pulled]:
        """Return the pulls that have ended since the last call."""
        if not self._pulled:
            return []
        pulled = [self._pulled.popleft() for _ in range(len(self._pulled))]
        ended = {one.request_id for one in pulled}
        self._pulling -= ended
        self._unwanted -= ended
        return pulled

    def close(self) -> None:
        """Close; return once nothing is in flight."""
        self.cancel(list(self._pulling))
        self._executor.shutdown(wait=True)
        self._connections.close()

    def _pull(self, pull: Pull, fence: Callable[[], object]) -> None:
        arrived = valid = 0
        try:
            fence()
            arrived = self._read(pull)
            if arrived:
                valid = self._num_valid(pull, arrived)
        except LostTrackError:
            logger.exception(
                "Direct read: it is not known when the reads for request %s end: its "
                "blocks are never used again",
                pull.request_id,
            )
            return
        except DirectReadError as error:
            logger.warning("Direct read: what was read does not count: %s", error)
        except Exception:
            logger.exception("Direct read: a pull failed")
        self._pulled.append(self._report(pull, arrived, valid))

    def _read(self, pull: Pull) -> int:
        """Read the blocks and return how many leading ones arrived."""
        theirs = pull.workers[self._rank]
        if theirs.block_bytes != self._ours.block_bytes:
            raise DirectReadError("the peer's blocks have other sizes than ours")
        regions = [
            Region(*region)
            for region in zip(
                self._ours.base_addresses,
                theirs.base_addresses,
                self._ours.block_bytes,
                strict=True,
            )
        ]
        return read_blocks(
            self._engine,
            theirs.session,
            regions,
            pull.block_ids,
            pull.peer_block_ids,
            lambda: pull.request_id in self._unwanted,
        )

    def _num_valid(self, pull: Pull, arrived: int) -> int:
        """Return how many of the arrived blocks stayed valid during the read."""
        # Another process may be there now: it does not know the token.
        with self._connections.to((pull.host, pull.port)) as client:
            valid = client.validate(pull.token) - pull.skipped
        return min(max(valid, 0), arrived)

    def _report(self, pull: Pull, arrived: int, valid: int) -> Pulled:
        counts = {
            "pulls": 1,
            "pulls_cut_short": int(valid < len(pull.block_ids)),
            "blocks_pulled": valid,
            "blocks_rejected": arrived - valid,
            "blocks_unread": len(pull.block_ids) - arrived,
            "bytes_pulled": valid * sum(self._ours.block_bytes),
        }
        return Pulled(pull.request_id, pull.block_ids[valid:], counts)


@dataclass
class DirectReadMetadata(KVConnectorMetadata):
    """For one step. `counts` are the scheduler's: see metrics.py."""

    pulls: list[Pull] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class DirectReadHandshake(KVConnectorHandshakeMetadata):
    """A worker's memory: where it is, and how it is laid out."""

    address: WorkerAddress
    layout: dict[str, str]
