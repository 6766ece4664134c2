# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a request on demand, and with which request.

A fault is chosen by the request's `X-Standin-Fault` header, else by the cycle given
with `--faults` or `POST /faults?cycle=none,http500`: request i gets the i-th of it, and
starts again at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle

FAULTS = {
    "none": "answers as it should",
    "hang": "never begins to answer",
    "hang_first": "sends the response's head, then nothing",
    "stall": "stops after --fault-after tokens, the connection stays open",
    "http500": "answers 500 at once",
    "inband": "sends an error event after --fault-after tokens, under status 200",
    "truncated": "ends the body properly after --fault-after tokens, without [DONE]",
    "cut": "drops the connection after --fault-after tokens",
    "short": "produces and reports one token less than asked",
    "no_token": "ends the stream with the usage, without a token, under status 200",
    "no_usage": "leaves out the usage",
    "exit": "the process exits after --fault-after tokens",
    "withhold_kv": "as a P instance answers, but never hands over the KV",
}
HEADER = "X-Standin-Fault"


class UnknownFault(ValueError):
    """Names the fault and what there is."""


class Faults:
    """Which fault a request gets. `deaf`: nothing is answered any more, health too."""

    def __init__(self, names: list[str], after_tokens: int) -> None:
        self.after_tokens = after_tokens
        self.deaf = False
        self._cycle: Iterator[str]
        self.set_cycle(names)

    def set_cycle(self, names: list[str]) -> None:
        """Start a new cycle with the next request. Raises UnknownFault."""
        self._cycle = cycle([_known(name) for name in names] or ["none"])

    def next(self, headers: Mapping[str, str]) -> str:
        """The fault of the request with these headers. Raises UnknownFault."""
        named = headers.get(HEADER)
        return next(self._cycle) if named is None else _known(named)


def _known(name: str) -> str:
    if name not in FAULTS:
        raise UnknownFault(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    return name
