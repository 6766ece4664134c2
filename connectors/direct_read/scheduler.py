# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: asks peers what they have, and answers what is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash

from connectors.direct_read import fingerprint
from connectors.direct_read.client import Address
from connectors.direct_read.ledger import BlockLedger, ChangeCounter
from connectors.direct_read.lookups import (
    NOTHING,
    OFFER_LIFETIME_S,
    Found,
    Lookups,
)
from connectors.direct_read.metadata import DirectReadHandshake, DirectReadMetadata
from connectors.direct_read.metrics import SchedulerCounts
from connectors.direct_read.protocol import MAX_HASHES, Peer
from connectors.direct_read.reads import Pull
from connectors.direct_read.server import Server
from connectors.direct_read.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# vLLM shows what its own loggers say.
logger = init_logger("vllm.direct_read")

NOTHING_TO_DO = DirectReadMetadata()
# Methods of vLLM's workers that leave the weights alone. Any other may change them.
HARMLESS_METHODS = {
    "get_encoder_timing_stats",
    "get_model_inspection",
    "init_weight_transfer_engine",
}
# As in DNS.
MAX_HOST_CHARACTERS = 253


@dataclass
class Asked:
    """A request whose peer was asked for its blocks from `first_block` on."""

    address: Address
    first_block: int
    answer: Future[Found]


class DirectReadScheduler:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self._settings = Settings.of(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._block_size = self._spec.block_size
        self._admission: Admission | None = None
        self._server: Server | None = None
        # Public, with offer_lifetime_s: a simulation reads ledgers without a network.
        self.offer_lifetime_s = OFFER_LIFETIME_S
        self.ledger: BlockLedger | None = None
        self._cache: ChangeCounter | None = None
        self.lookups: Lookups | None = None
        # By request, until its pull begins. Then None, as for a request without a pull:
        # each pulls once, and after a failure or a preemption it is computed here.
        self._asked: dict[str, Asked | None] = {}
        self._pulls: list[Pull] = []
        self._counts = SchedulerCounts()

    def bind_gpu_block_pool(self, block_pool: BlockPool) -> None:
        if self._settings.pulls:
            self._admission = Admission(block_pool, self._block_size)
        if self._settings.serves:
            readers = self._vllm_config.parallel_config.tensor_parallel_size
            self.ledger = BlockLedger(block_pool, readers)
        self._cache = self.ledger or ChangeCounter(block_pool)

    def on_workers_called(self, method: str | Callable[..., Any]) -> None:
        """Count a call of the workers that may change their weights."""
        if self._cache is not None and method not in HARMLESS_METHODS:
            self._cache.on_weight_update()

    def set_workers(self, workers: dict[int, DirectReadHandshake]) -> None:
        """Set the workers by TP rank. Raises RuntimeError if vLLM lacks a patch."""
        if self._admission is None and self.ledger is None:
            raise RuntimeError(
                "DirectReadConnector: the scheduler did not hand over its block pool, "
                "apply the patches block_pool_delta_listener and direct_read_hooks"
            )
        for worker in workers.values():
            if not isinstance(worker, DirectReadHandshake):
                raise RuntimeError(
                    f"DirectReadConnector: got a {type(worker).__name__}: in a "
                    "MultiConnector only one connector can have handshake metadata"
                )
        ranked = [worker for _, worker in sorted(workers.items())]
        # The engine does this later; with a seed set, the result is the same.
        hash_algo = self._vllm_config.cache_config.prefix_caching_hash_algo
        init_none_hash(get_hash_fn_by_name(hash_algo))
        ours = fingerprint.of(
            self._vllm_config, {"spec": str(self._spec)} | ranked[0].layout
        )
        if self._settings.pulls:
            self.lookups = Lookups(self._settings.secret, ours)
        if self.ledger is not None:
            peer = Peer(ours, [worker.address for worker in ranked])
            settings = self._settings
            self._server = Server(
                self.ledger, peer, settings.secret, settings.host, settings.port
            )
            self._counts.serves(self.ledger.counters)
            logger.info(
                "Direct read: peers can ask at %s:%d", settings.host, self._server.port
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._admission is None:
            return 0, False
        num_blocks = self._num_offered(request, num_computed_tokens)
        # vLLM asks this for every request without blocks, also for one without a peer.
        if num_blocks is None or not self._admission.admits(request, num_blocks > 0):
            return None, False
        return num_blocks * self._block_size, num_blocks > 0

    def _num_offered(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many further blocks the peer has; None while the lookup runs."""
        params = request.kv_transfer_params
        if not params or "direct_read" not in params:
            return 0
        first_block = num_computed_tokens // self._block_size
        if request.request_id not in self._asked:
            self._asked[request.request_id] = self._ask(request, first_block)
        asked = self._asked[request.request_id]
        if asked is None:
            return 0
        if not asked.answer.done():
            return None
        reply = asked.answer.result()
        if reply.is_stale():
            # The request has waited too long for free blocks: ask again.
            del self._asked[request.request_id]
            return None
        if not self._is_of_our_weights(reply, asked.address):
            self._counts.answered(NOTHING)
            self._asked[request.request_id] = None
            return 0
        # Meanwhile more or fewer of its blocks may be cached here.
        skipped = first_block - asked.first_block
        num_blocks = len(reply.offer.block_ids) - skipped
        if skipped < 0 or num_blocks <= 0:
            self._counts.answered(reply)
            self._asked[request.request_id] = None
            return 0
        return num_blocks

    def _is_of_our_weights(self, reply: Found, address: Address) -> bool:
        """Decide if the offer's blocks can be of the same weights as ours.

        Weights change in one instance after the other. An offer that was made before
        our own last update or reset is refused, too.
        """
        assert self._cache is not None
        offer = reply.offer
        ours, theirs = self._cache.changes(), (offer.resets, offer.weight_updates)
        if ours == theirs or not offer.block_ids:
            return True
        logger.warning_once(
            "Direct read: nothing from %s:%d: prefix_cache_resets and weight_updates "
            "are %d and %d here, %d and %d there; update and reset the instance that "
            "is behind",
            *address,
            *ours,
            *theirs,
        )
        return False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        asked = self._asked.get(request.request_id)
        if asked is None:
            return
        self._asked[request.request_id] = None
        reply = asked.answer.result()
        self._counts.answered(reply)
        if num_external_tokens == 0:
            # In a MultiConnector, another connector loads the blocks.
            return
        assert reply.peer is not None
        num_blocks = num_external_tokens // self._block_size
        skipped = len(reply.offer.block_ids) - num_blocks
        first_block = asked.first_block + skipped
        (block_ids,) = blocks.get_block_ids()
        host, port = asked.address
        pull = Pull(
            request_id=request.request_id,
            host=host,
            port=port,
            token=reply.offer.token,
            skipped=skipped,
            workers=reply.peer.workers,
            peer_block_ids=reply.offer.block_ids[skipped:],
            block_ids=block_ids[first_block : first_block + num_blocks],
        )
        self._pulls.append(pull)
        assert self._admission is not None
        self._admission.pulls(request)

    def begin_step(self, running: Iterable[str]) -> DirectReadMetadata:
        """Begin a step with the requests `running`; return the workers' tasks."""
        if self._admission is not None:
            self._admission.end_schedule(running)
        if self.ledger is not None:
            self.ledger.begin_step()
        counts = self._counts.take()
        if not self._pulls and not counts:
            return NOTHING_TO_DO
        pulls, self._pulls = self._pulls, []
        return DirectReadMetadata(pulls, counts)

    def finish_step(self) -> None:
        """End the oldest step under way: its output has been processed."""
        if self.ledger is not None:
            self.ledger.finish_step()

    def request_finished(self, request: Request) -> None:
        self._asked.pop(request.request_id, None)
        if self._admission is not None:
            self._admission.finished(request.request_id)

    def shutdown(self) -> None:
        if self.lookups is not None:
            self.lookups.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, request: Request, first_block: int) -> Asked | None:
        assert self.lookups is not None
        address = _address(request.kv_transfer_params["direct_read"])
        # At least one token is left to compute, as there must be one to sample from.
        end_block = (request.num_tokens - 1) // self._block_size
        end_block = min(end_block, first_block + MAX_HASHES)
        hashes = request.block_hashes[first_block:end_block]
        # Prompt log probabilities, for example, need a forward pass over all of it.
        if address is None or not hashes or request.skip_reading_prefix_cache:
            return None
        return Asked(address, first_block, self.lookups.ask(address, hashes))


def _address(params: Any) -> Address | None:
    """Return the address in a request's parameters, or None."""
    try:
        host, port = params["host"], params["port"]
    except (TypeError, KeyError):
        host = port = None
    if _is_host(host) and isinstance(port, int) and 0 < port < 65536:
        return host, port
    logger.warning_once(
        'Direct read: kv_transfer_params["direct_read"] must have a host and a port'
    )
    return None


def _is_host(host: Any) -> bool:
    """Return whether `host` can be a name or an address, and is fit for the log."""
    return (
        isinstance(host, str)
        and 0 < len(host) <= MAX_HOST_CHARACTERS
        and host.isascii()
        and host.isprintable()
    )


if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


class Admission:
    """Rules for giving blocks to requests: pulls must never stop the engine.

    A request that pulls gets its blocks before it runs, and cannot be preempted. vLLM
    0.18.1 gives it only the blocks for what it pulls, and looks at waiting requests
    only up to the first that does not fit. So an engine can stop for good, with nothing
    running, when all blocks belong to requests that wait for more blocks, or to
    requests queued behind one that has none. Later releases prevent this; on 0.18.1 the
    connector must, by two rules:

    - Only so many requests pull at a time that all of them fit, with the rest of their
      blocks.
    - A request without blocks that does not fit lets those that have blocks pass, and
      no other request after it.

    All methods are for the scheduler's thread.
    """

    def __init__(self, block_pool: BlockPool, block_size: int) -> None:
        self._pool = block_pool
        self._block_size = block_size
        # One block is never given out.
        self._usable_blocks = block_pool.num_gpu_blocks - 1
        # Requests that have pulled blocks and have not run yet, and what they need.
        self._waiting: dict[str, int] = {}
        self._held_back = False

    def admits(self, request: Request, pulls: bool) -> bool:
        """Decide, in queue order, if a request may have blocks in this schedule()."""
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
        """Note that the request has blocks now."""
        self._waiting[request.request_id] = self._needed_blocks(request)

    def end_schedule(self, running: Iterable[str]) -> None:
        """End a schedule() that made a step of the requests `running`."""
        self._held_back = False
        if self._waiting:
            for request_id in running:
                self._waiting.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def _needed_blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self._block_size)
