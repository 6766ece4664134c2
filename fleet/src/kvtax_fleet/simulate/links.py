# SPDX-License-Identifier: Apache-2.0
"""The links between instances, and when what they carry arrives."""

from __future__ import annotations

from collections import defaultdict

from kvtax_fleet.launch.instance_settings import Transfer

INSTANT = Transfer(kv_bytes_per_token=0, gbit_s=1)


class Links:
    """The links of a fleet: each instance has one out and one in, which serve in turn.

    `times` None: transfers take no time.
    """

    def __init__(self, times: Transfer | None, block_tokens: int) -> None:
        self._times = times or INSTANT
        self._block_tokens = block_tokens
        # By engine: when its link is free.
        self._out_free_ns: dict[str, int] = defaultdict(int)
        self._in_free_ns: dict[str, int] = defaultdict(int)

    @property
    def latency_ns(self) -> int:
        """One way, for a message without a size."""
        return round(self._times.latency_us * 1e3)

    def carry(
        self,
        source: str,
        target: str,
        blocks: int,
        ready_ns: int,
        begun_ns: int | None = None,
    ) -> int:
        """Send blocks that are all ready at `ready_ns`; return when they arrive.

        Blocks that are computed from `begun_ns` on, in equal pieces and at an even
        pace, leave piece by piece, as the pieces and the links are ready. Between
        pieces the links wait.
        """
        duration_ns = round(self._times.us(blocks * self._block_tokens) * 1e3)
        pieces = 1 if begun_ns is None else self._times.pieces
        piece_ns = 0 if begun_ns is None else (ready_ns - begun_ns) // pieces
        first_ns = ready_ns - (pieces - 1) * piece_ns
        begins_ns = max(first_ns, self._out_free_ns[source], self._in_free_ns[target])
        # The last piece waits for the links, or for itself.
        gone_ns = max(begins_ns + duration_ns, ready_ns + duration_ns // pieces)
        self._out_free_ns[source] = self._in_free_ns[target] = gone_ns
        return gone_ns + self.latency_ns
