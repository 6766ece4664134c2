# SPDX-License-Identifier: Apache-2.0
"""One instance's KV events, received over ZMQ in the order they were made.

vLLM publishes batches with a sequence number from 0 and, if told so, keeps the last
ones for a replay (vllm/distributed/kv_events.py, ZmqEventPublisher). A subscriber
starts with a replay of everything that is kept, and asks again after a gap. Where that
does not help, the state is emptied and counts as incomplete until the instance restarts
or resets its cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from .exact import AllBlocksCleared, BlockRemoved, BlockStored, Event

REPLAY_TIMEOUT_S = 2.0
# vLLM's ROUTER drops what goes over its high-water mark of 1000, so a long replay
# comes in pieces.
MAX_REPLAYS = 100
_END = (-1).to_bytes(8, "big", signed=True)
log = logging.getLogger(__name__)


class Batch(msgspec.Struct, array_like=True):
    """`ts` is the publisher's wall clock in seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _Undecoded(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


_undecoded = msgspec.msgpack.Decoder(_Undecoded).decode
_of_map = msgspec.msgpack.Decoder(Event).decode
_of_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


def read_batch(payload: bytes) -> Batch:
    """A batch of any release: to 0.22.1 an event is an array, from 0.25.1 on a map.

    Raises msgspec.DecodeError.
    """
    batch = _undecoded(payload)
    events = [(_of_map if _is_map(raw) else _of_array)(raw) for raw in batch.events]
    return Batch(batch.ts, events)


def _is_map(raw: msgspec.Raw) -> bool:
    """By the first byte: fixmap, map 16 or map 32 of msgpack."""
    first = memoryview(raw)[0]
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


class Subscriber:
    """Calls `apply(events)` and `clear()` until `run` is cancelled.

    `complete` says whether all events since the instance's start, or since its cache
    was last empty, have been applied. `gaps` counts sequence gaps.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        replay_endpoint: str | None,
        apply: Callable[[list[Event]], None],
        clear: Callable[[], None],
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._apply = apply
        self._clear = clear
        self._next = 0
        self._last_ts = 0.0
        self._resync = asyncio.Event()
        self.complete = False
        self.gaps = 0

    def resync(self) -> None:
        """Empty the state and take all events again: the instance may be a new one."""
        self._resync.set()

    async def run(self) -> None:
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            # vLLM connects to an endpoint without a wildcard and binds one with.
            if "*" in self._endpoint:
                socket.bind(self._endpoint)
            else:
                socket.connect(self._endpoint)
            await self._start_anew()
            while True:
                try:
                    await self._receive(socket)
                except ValueError as error:
                    self._lost(f"unreadable: {error}")

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        if not await socket.poll(500):
            if self._resync.is_set():
                await self._start_anew()
            return
        _, number, payload = await socket.recv_multipart()
        if self._resync.is_set():
            await self._start_anew()
        sequence = int.from_bytes(number, "big")
        batch = self._read(sequence, payload)
        if batch is None:
            return
        if sequence < self._next:
            if batch.ts <= self._last_ts:
                return  # the replay had it
            log.warning("%s: KV events start anew", self._name)
            await self._start_anew()
        if sequence > self._next:
            self.gaps += 1
            log.warning(
                "%s: KV events %d to %d missed", self._name, self._next, sequence - 1
            )
            await self._replay()
        if sequence < self._next:
            return
        if sequence > self._next:
            self._lost(f"those before {sequence} are gone")
        self._take(sequence, batch)
        await asyncio.sleep(0)  # many in a row must not keep requests waiting

    async def _start_anew(self) -> None:
        self._resync.clear()
        self._clear()
        self._next, self._last_ts, self.complete = 0, 0.0, False
        await self._replay()

    def _read(self, sequence: int, payload: bytes) -> Batch | None:
        """None if it cannot be read; it is not asked for again."""
        try:
            return read_batch(payload)
        except msgspec.DecodeError as error:
            self._lost(f"{sequence} is unreadable: {error}")
            self._next = max(self._next, sequence + 1)
            return None

    def _take(self, sequence: int, batch: Batch) -> None:
        if sequence == 0 or _clears(batch):
            self.complete = True
        self._apply(batch.events)
        self._next, self._last_ts = sequence + 1, batch.ts

    def _lost(self, why: str) -> None:
        log.warning("%s: KV events lost: %s", self._name, why)
        self._clear()
        self.complete = False

    async def _replay(self) -> None:
        """Apply what the publisher still has from the next number on."""
        for _ in range(MAX_REPLAYS):
            if self._replay_endpoint is None or not await self._replay_once():
                return

    async def _replay_once(self) -> bool:
        """Whether to ask again: the answer had a hole after it had begun well."""
        first = self._next
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while await socket.poll(REPLAY_TIMEOUT_S * 1000):
                # From 0.28.0 on, the topic comes between delimiter and number.
                *_, number, payload = await socket.recv_multipart()
                if number == _END:
                    self.complete |= self._next == 0  # nothing has happened yet
                    return False
                sequence = int.from_bytes(number, "big")
                if sequence < self._next:
                    continue
                if sequence > self._next:
                    if self._next > first:
                        return True
                    self._lost(f"those before {sequence} are gone")
                if batch := self._read(sequence, payload):
                    self._take(sequence, batch)
                await asyncio.sleep(0)
        return self._next > first


def _clears(batch: Batch) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in batch.events)
