# SPDX-License-Identifier: Apache-2.0
"""Reads blocks out of a peer's memory, and returns only once nothing is in flight.

An error of one read does not mean that the others have stopped: Mooncake may write what
it has accepted into our memory much later. So each read is a batch of its own, because
`transfer_check_status` tells the end of such a batch only, and each is followed to its
end, whatever happened to the others. For the same reason only few are under way at a
time: a peer that has stopped then keeps our blocks for one timeout, not for many.
Threads pull: read, go quiet, validate, report.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from connectors.direct_read.client import Connections
from connectors.direct_read.protocol import DirectReadError, WorkerAddress

MAX_IN_FLIGHT = 4
# How long to wait before the next look: a share of the time waited so far.
PAUSE_SHARE = 1 / 8
MAX_PAUSE_S = 1e-3
# What transfer_check_status returns at the end. Anything else, also a timeout, is not
# the end.
DONE, FAILED = 1, -1
# What batch_transfer_async_read returns in place of a batch: 0, or -1 as unsigned.
NOT_BEGUN = (0, -1, 2**64 - 1)


class LostTrackError(Exception):
    """Reads may be in flight, and nobody can tell for how long."""


class TransferEngine(Protocol):
    """The part of mooncake.engine.TransferEngine that is used here."""

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
    ) -> int: ...

    def transfer_check_status(self, batch_id: int) -> int: ...


@dataclass(frozen=True)
class Region:
    """One tensor, ours and the peer's: addresses of block 0, bytes per block."""

    address: int
    peer_address: int
    block_bytes: int


@dataclass
class Run:
    """Blocks that follow each other in our memory and in the peer's.

    `first` is the place of the earliest of them in the request's order; `missing` is
    how many regions of them have not arrived.
    """

    block_id: int
    peer_block_id: int
    count: int
    first: int
    missing: int


def contiguous_runs(
    block_ids: list[int], peer_block_ids: list[int], regions: int
) -> list[Run]:
    """Merge the blocks into as few runs as possible, earliest blocks first.

    vLLM frees a request's blocks in reverse, so a pool gives out ascending ids in one
    round and descending ones in the next. Taken in the order of the peer's ids, both
    rounds give the same runs.
    """
    runs: list[Run] = []
    places = range(len(block_ids))
    for peer_block_id, block_id, place in sorted(
        zip(peer_block_ids, block_ids, places, strict=True)
    ):
        if (
            runs
            and block_id == runs[-1].block_id + runs[-1].count
            and peer_block_id == runs[-1].peer_block_id + runs[-1].count
        ):
            runs[-1].count += 1
            runs[-1].first = min(runs[-1].first, place)
        else:
            runs.append(Run(block_id, peer_block_id, 1, place, regions))
    return sorted(runs, key=lambda run: run.first)


def read_blocks(
    engine: TransferEngine,
    session: str,
    regions: list[Region],
    block_ids: list[int],
    peer_block_ids: list[int],
    stopped: Callable[[], bool],
) -> int:
    """Read the peer's blocks into ours, and return how many leading ones arrived.

    No further read begins once one has failed or `stopped()`. Raises LostTrackError
    if the engine cannot be asked how a read ended.
    """
    runs = contiguous_runs(block_ids, peer_block_ids, len(regions))
    # Run by run, so that blocks that arrived before a failure can be used.
    waiting: Iterator[tuple[Run, Region]] = (
        (run, region) for run in runs for region in regions
    )
    in_flight: dict[int, Run] = {}
    last_end_s = time.monotonic()
    more = True
    while True:
        while more and len(in_flight) < MAX_IN_FLIGHT:
            more = not stopped() and _begin(engine, session, waiting, in_flight)
        if not in_flight:
            break
        ended = _poll(engine, in_flight)
        more = more and FAILED not in ended
        now_s = time.monotonic()
        if ended:
            last_end_s = now_s
        else:
            time.sleep(min((now_s - last_end_s) * PAUSE_SHARE, MAX_PAUSE_S))
    return next((run.first for run in runs if run.missing), len(block_ids))


def _begin(
    engine: TransferEngine,
    session: str,
    waiting: Iterator[tuple[Run, Region]],
    in_flight: dict[int, Run],
) -> bool:
    """Begin the next read; False if there is none or it cannot be begun."""
    if (read := next(waiting, None)) is None:
        return False
    run, region = read
    try:
        batch_id = engine.batch_transfer_async_read(
            session,
            [region.address + run.block_id * region.block_bytes],
            [region.peer_address + run.peer_block_id * region.block_bytes],
            [run.count * region.block_bytes],
        )
    except Exception:
        # This read did not begin, but earlier ones must still be followed to their end.
        return False
    if batch_id in NOT_BEGUN:
        return False
    in_flight[batch_id] = run
    return True


def _poll(engine: TransferEngine, in_flight: dict[int, Run]) -> list[int]:
    """Remove the reads that have ended from `in_flight` and return their statuses."""
    ended = []
    for batch_id, run in list(in_flight.items()):
        try:
            status = engine.transfer_check_status(batch_id)
        except Exception as error:
            raise LostTrackError from error
        if status in (DONE, FAILED):
            # Mooncake has freed the batch, and may give its id to the next.
            del in_flight[batch_id]
            ended.append(status)
            run.missing -= status == DONE
    return ended


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
        ended = {pull.request_id for pull in pulled}
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
