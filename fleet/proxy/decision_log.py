# SPDX-License-Identifier: Apache-2.0
"""decisions.jsonl (kvtax.decisions/1): what was decided for whom, and how it ended.

Every request to a completion endpoint has exactly one `end` line. One that got to a
decision has a `decision` line before it, two if the first instance could not be
reached (`attempt` 0 and 1; the last one counts). `number` is the proxy's own and joins
them even if clients repeat an id. A killed proxy leaves decisions without ends, and may
leave a torn last line. Lines are written by a thread, so that a slow disk delays no
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic_ns
from typing import Any, Literal, Self

import msgspec

from fleet.policies import Ask, Decision, Snapshot

FLUSH_EVERY_S = 0.25
KEPT = 1000
Status = Literal["ok", "failed", "refused", "client_gone", "proxy_stopped"]
log = logging.getLogger(__name__)


class DecisionLine(msgspec.Struct, tag_field="type", tag="decision"):
    """A decision and all that it was made of. `cache` says whose cached_tokens."""

    id: str
    number: int
    attempt: int
    session: str | None
    at_ns: int
    policy: str
    instance: str
    prefill_instance: str | None
    read_from: str | None
    reason: str
    kind: str | None = msgspec.field(name="class")
    prompt_tokens: int
    form: str
    cache: Literal["mirror", "exact"]
    scores: dict[str, float]
    snapshot: Snapshot
    decision_us: float


class EndLine(msgspec.Struct, tag_field="type", tag="end"):
    """How a request ended. Times are CLOCK_MONOTONIC ns, None if never reached.

    `prefill_instance` is the one whose KV was really used; `fallback` says why it was
    not the decision's.
    """

    id: str
    number: int
    session: str | None
    status: Status | None = None
    error: str | None = None
    http_status: int | None = None
    instance: str | None = None
    prefill_instance: str | None = None
    fallback: str | None = None
    generated_tokens: int = 0
    first_byte_ns: int | None = None
    end_ns: int | None = None


class DecisionLog:
    """Appends to `path`, which must not exist yet (FileExistsError); None: no file."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.policy = header["policy"]
        self.recent: deque[bytes] = deque(maxlen=KEPT)
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode
        self._file = None if path is None else path.open("xb", buffering=0)
        self._writer = ThreadPoolExecutor(1, "decisions")
        self._failed = False
        head = {"schema": "kvtax.decisions/1", "clock": "CLOCK_MONOTONIC", **header}
        self._lines.append(self._encode(head))
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()

    def decided(
        self,
        end: EndLine,
        attempt: int,
        ask: Ask,
        snapshot: Snapshot,
        decision: Decision,
        form: str,
        cache: Literal["mirror", "exact"],
        decision_us: float,
    ) -> None:
        line = self._encode(
            DecisionLine(
                id=end.id,
                number=end.number,
                attempt=attempt,
                session=ask.session,
                at_ns=monotonic_ns(),
                policy=self.policy,
                instance=decision.instance,
                prefill_instance=decision.prefill,
                read_from=decision.read_from,
                reason=decision.reason,
                kind=decision.kind,
                prompt_tokens=ask.prompt_tokens,
                form=form,
                cache=cache,
                scores=decision.scores,
                snapshot=snapshot,
                decision_us=decision_us,
            )
        )
        self.recent.append(line)
        self._lines.append(line)

    def ended(self, end: EndLine) -> None:
        end.end_ns = monotonic_ns()
        self._lines.append(self._encode(end))

    async def flush_forever(self) -> None:
        """Write at intervals until cancelled. A full disk costs lines, not requests."""
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines and self._file is not None:
            self._writer.submit(self._write, b"\n".join([*lines, b""]))

    def _write(self, lines: bytes) -> None:
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as error:
            if not self._failed:
                log.error("%s: lines are lost: %s", self._file.name, error)
            self._failed = True
