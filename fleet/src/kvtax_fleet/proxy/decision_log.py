# SPDX-License-Identifier: Apache-2.0
"""The decision log: writes decisions.jsonl, holds the last decisions for /decisions."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any, Self

import msgspec
from kvtax.records.files import LineFile

from kvtax_fleet.policies.decision import Decision
from kvtax_fleet.records.decisions import DecisionEnd, DecisionRecord, DecisionsHeader

RECENT = 1000
log = logging.getLogger(__name__)


class DecisionLog:
    """The new file `path` (else FileExistsError) of decisions, for its owner only.

    None: no file. No line has text of a prompt or an answer.
    """

    def __init__(
        self,
        path: Path | None,
        header: DecisionsHeader,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.policy = header.policy
        self._now_ns = now_ns
        self.recent: deque[bytes] = deque(maxlen=RECENT)
        self._encode = msgspec.json.Encoder().encode
        self._path = path
        self._file = None if path is None else LineFile(path, header, mode=0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush()
        if self._file is not None:
            self._file.__exit__(*exc_info)

    def decided(self, end: DecisionEnd, decision: Decision, **more: Any) -> None:
        """Add a decision; `more` are further fields of its line."""
        fields = msgspec.structs.asdict(decision)
        line = self._encode(
            DecisionRecord(
                id=end.id,
                number=end.number,
                session=end.session,
                at_ns=self._now_ns(),
                policy=self.policy,
                prefill_instance=fields.pop("prefill"),
                **fields,
                **more,
            )
        )
        self.recent.append(line)
        if self._file is not None:
            self._file.append(msgspec.Raw(line))

    def ended(self, end: DecisionEnd) -> None:
        """Add the end of a request."""
        end.end_ns = self._now_ns()
        if self._file is not None:
            self._file.append(end)

    def flush(self) -> None:
        """Write all lines so far. A full disk costs lines, not requests."""
        if self._file is None:
            return
        try:
            self._file.flush().result()
        except OSError as error:
            log.error("%s: lines are lost: %s", self._path, error)

    async def flush_forever(self) -> None:
        """Write at intervals until cancelled. A full disk costs lines, not requests."""
        if self._file is None:
            return
        try:
            await self._file.flush_forever()
        except OSError as error:
            log.error("%s: lines are lost: %s", self._path, error)
        while True:
            with contextlib.suppress(OSError):
                await self._file.flush_forever()
