# SPDX-License-Identifier: Apache-2.0
"""Requests as arrays, a batch at a time: traces of millions go through numpy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from fleet.trace.prefixes import OwnerTable
from fleet.trace.request import Request

# Big enough that numpy's calls cost nothing, small enough for the processor's cache.
BATCH_BLOCKS = 1 << 17
BATCH_REQUESTS = 1 << 14


class Batch(NamedTuple):
    """Requests in order of arrival."""

    requests: list[Request]
    lengths: np.ndarray  # blocks of each, int64
    ids: np.ndarray  # blocks of all of them in a row, uint64


def batches(requests: Iterable[Request]) -> Iterator[Batch]:
    """Cut a trace into batches."""
    taken: list[Request] = []
    ids: list[int] = []
    for request in requests:
        taken.append(request)
        ids += request.hashes
        if len(ids) >= BATCH_BLOCKS or len(taken) >= BATCH_REQUESTS:
            yield _batch(taken, ids)
            taken, ids = [], []
    if taken:
        yield _batch(taken, ids)


def _batch(requests: list[Request], ids: list[int]) -> Batch:
    lengths = np.array([len(request.hashes) for request in requests])
    return Batch(requests, lengths, np.array(ids, np.uint64))


class SessionNumbers:
    """Numbers sessions by their first request's place in the trace."""

    def __init__(self) -> None:
        self._table = OwnerTable()
        self._requests = 0

    def of(self, names: list[str]) -> np.ndarray:
        """The sessions that the next requests belong to, int32."""
        own = np.arange(self._requests, self._requests + len(names), dtype=np.int32)
        self._requests += len(names)
        first = self._table.claim(session_keys(names), own)
        return np.where(first < 0, own, first)


def session_keys(names: list[str]) -> np.ndarray:
    """Names as 64-bit hashes, the same in every process, uint64."""
    digests = (blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(digests), "<u8")
