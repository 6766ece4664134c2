# SPDX-License-Identifier: Apache-2.0
"""The links between instances: each has one out and one in, and serves them in turn."""

from __future__ import annotations

from collections import defaultdict

from vllm.v1.outputs import KVConnectorOutput

from fleet.launch.instance_settings import Transfer

INSTANT = Transfer(kv_bytes_per_token=0, gbit_s=1)


class Links:
    """All links of one fleet, with blocks of `block_tokens`; no `times`: no time."""

    def __init__(self, times: Transfer | None, block_tokens: int) -> None:
        self._times = times or INSTANT
        self._block_tokens = block_tokens
        # By engine: when they are free.
        self._out_free_ns: dict[str, int] = defaultdict(int)
        self._in_free_ns: dict[str, int] = defaultdict(int)

    @property
    def latency_ns(self) -> int:
        """One way, of what has no size."""
        return round(self._times.latency_us * 1e3)

    def carry(
        self,
        source: str,
        target: str,
        blocks: int,
        ready_ns: int,
        begun_ns: int | None = None,
    ) -> int:
        """Send blocks that are all ready at `ready_ns`; when they will be there.

        If they are computed from `begun_ns` on, in equal pieces and at an even pace, a
        piece is sent when it and the links are ready. Between pieces the links wait.
        """
        took_ns = round(self._times.us(blocks * self._block_tokens) * 1e3)
        pieces = 1 if begun_ns is None else self._times.pieces
        waited_ns = 0 if begun_ns is None else (ready_ns - begun_ns) // pieces
        first_ns = ready_ns - (pieces - 1) * waited_ns
        begins_ns = max(first_ns, self._out_free_ns[source], self._in_free_ns[target])
        # The last piece waits for the links, or for itself.
        gone_ns = max(begins_ns + took_ns, ready_ns + took_ns // pieces)
        self._out_free_ns[source] = self._in_free_ns[target] = gone_ns
        return gone_ns + self.latency_ns


def told(
    sending: list[tuple[int, str]], receiving: list[tuple[int, str]], now_ns: int
) -> KVConnectorOutput | None:
    """What a worker reports of what is under way; None if nothing has ended."""
    sent, received = _ended(sending, now_ns), _ended(receiving, now_ns)
    if not sent and not received:
        return None
    return KVConnectorOutput(finished_sending=sent, finished_recving=received)


def _ended(under_way: list[tuple[int, str]], now_ns: int) -> list[str]:
    """The requests whose transfers have ended, in their order; they are taken out.

    `under_way` has (end, request). A list, where vLLM has a set: blocks are freed in
    the same order in every process.
    """
    found = sorted(one for one in under_way if one[0] <= now_ns)
    under_way[:] = [one for one in under_way if one[0] > now_ns]
    return [request_id for _, request_id in found]
