# SPDX-License-Identifier: Apache-2.0
"""One replay over HTTP from its first record to its last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from pathlib import Path
from typing import Any

from kvtax.load import allow_open_files
from kvtax.load.alarm import Alarm
from kvtax.load.client import Ledger, Stop, open_session
from kvtax.records.requests import ReplayEnd

from kvtax_fleet.replay.http_link import (
    Bodies,
    HttpLink,
    ReplayClient,
    check_lengths,
    check_vocabulary,
    find_model,
)
from kvtax_fleet.replay.options import Options
from kvtax_fleet.replay.play import Player
from kvtax_fleet.replay.sessions import Session, new_ledger


class Replay:
    """Sends the sessions of a trace, and records every request in `out`.

    Raises ReplayError.
    """

    records: Ledger
    player: Player

    def __init__(self, options: Options, sessions: list[Session], out: Path) -> None:
        self.options = options
        self.sessions = sessions
        self.scheduled = sum(len(session.turns) for session in self.sessions)
        self.out = out
        self.stop = Stop()

    async def execute(self, **header: Any) -> ReplayEnd:
        """Run to the end, or to SIGINT or SIGTERM; return the end line.

        Raises ReplayError if it cannot begin, FileExistsError if `out` exists, OSError
        if it cannot be written.
        """
        url = self.options.url
        check_vocabulary(self.sessions, self.options.vocab_size)
        async with open_session() as http:
            model = await find_model(http, url, self.options.model)
            check_lengths(self.sessions, model)
            client = ReplayClient(http, url, self.options.timeout_s)
            header |= {"model": model.id, "max_model_len": model.max_model_len}
            header |= {"scheduled": self.scheduled, "sessions": len(self.sessions)}
            allow_open_files()
            with (
                Bodies(model.id, self.options.vocab_size) as bodies,
                Alarm() as alarm,
                new_ledger(self.out, self.options, **header) as self.records,
            ):
                link = HttpLink(client, bodies, alarm)
                self.player = Player(self.options, self.sessions, link, self.records)
                return await self._recorded()

    async def _recorded(self) -> ReplayEnd:
        """Play everything and close the records, however the playing ends."""
        # The trace stays: a full collection would walk it while requests are due.
        gc.freeze()
        work = asyncio.create_task(self.player.play())
        self.stop.cancels(work)
        flushing = asyncio.create_task(self.records.flush_forever())
        flushing.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            pass  # requests without an answer are recorded below
        finally:
            self.player.cancel_rest()
        flushing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flushing
        stopped = self.stop.received is not None
        return self.player.end(stopped, replay_cpu_s=self.records.cpu_s)
