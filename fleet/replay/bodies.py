# SPDX-License-Identifier: Apache-2.0
"""Request bodies, made in a thread shortly before they are needed."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import msgspec
import numpy as np
from msgspec.json import encode

from fleet.replay.records import asked_output_tokens
from fleet.trace import Request
from fleet.trace.prompts import prompt
from lab.load.prompts import completion_body

# How long this thread may hold the interpreter while the sending thread waits for it.
# The sending thread gives it up at every system call, so that one request would wait
# several times. Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.00005
# Nothing interrupts a call of the encoder: this many token ids take it some 50 us.
PIECE_TOKENS = 2048


class Bodies:
    """Makes the bodies of one replay, one after another."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "bodies")
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def prepare(self, requests: list[Request]) -> list[Future[bytes]]:
        """Begin to make their bodies. The thread wakes once for all of them."""
        made: list[Future[bytes]] = [Future() for _ in requests]
        self._thread.submit(self._make, requests, made)
        return made

    def _make(self, requests: list[Request], made: list[Future[bytes]]) -> None:
        for request, body in zip(requests, made, strict=True):
            try:
                body.set_result(self._body(request))
            except Exception as error:  # raised again where the body is awaited
                body.set_exception(error)

    def _body(self, request: Request) -> bytes:
        ids = _in_pieces(prompt(request, self._vocab_size))
        return completion_body(self._model, ids, asked_output_tokens(request))


def _in_pieces(tokens: np.ndarray) -> msgspec.Raw:
    """The JSON array of `tokens`, written piece by piece."""
    pieces = range(0, len(tokens), PIECE_TOKENS)
    texts = [encode(tokens[at : at + PIECE_TOKENS].tolist())[1:-1] for at in pieces]
    return msgspec.Raw(b"[" + b",".join(texts) + b"]")
