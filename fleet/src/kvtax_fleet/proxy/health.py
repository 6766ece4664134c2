# SPDX-License-Identifier: Apache-2.0
"""Instances that are out: they get no request until their /health answers well.

An instance goes out as soon as a connection to it fails or breaks, or its /health
answers with an error. No answer of /health in time puts it out only while nothing is
in flight there: a busy server answers late, and its work in flight is a sign of life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvtax_fleet.proxy.exchange import Failure, Lost, Silent
from kvtax_fleet.records.instances import Instance

POLL_EVERY_S = 1.0
log = logging.getLogger(__name__)
# Requests an instance's /health. Raises Lost; Silent without an answer in time.
Probe = Callable[[Instance], Awaitable[None]]


class Health:
    """The instances that are `out`; `on_out` is called with the name of each."""

    def __init__(
        self,
        instances: Sequence[Instance],
        is_busy: Callable[[str], bool],
        on_out: Callable[[str], None],
    ) -> None:
        self._instances = instances
        self._is_busy = is_busy
        self._on_out = on_out
        self._returned = asyncio.Event()
        self.out: set[str] = set()

    def failed(self, failure: Failure) -> None:
        """Note a failure: the instance is out if its connection is lost."""
        name = failure.instance
        if name is None or name in self.out or not isinstance(failure, Lost):
            return
        self.out.add(name)
        log.warning("%s is out: %s", name, failure)
        self._on_out(name)

    async def until_return(self) -> None:
        """Wait until an instance is back."""
        self._returned.clear()
        await self._returned.wait()

    async def poll_forever(self, probe: Probe) -> None:
        """Poll all instances until cancelled, each again POLL_EVERY_S after its end."""
        async with asyncio.TaskGroup() as polls:
            for instance in self._instances:
                polls.create_task(self._poll_one_forever(probe, instance))

    async def _poll_one_forever(self, probe: Probe, instance: Instance) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll(probe, instance)

    async def poll(self, probe: Probe, instance: Instance) -> None:
        """Poll an instance."""
        name = instance.name
        try:
            await probe(instance)
        except Lost as failure:
            if not (isinstance(failure, Silent) and self._is_busy(name)):
                self.failed(failure)
        except Exception:  # and the next poll may be good
            log.exception("/health of %s", name)
        else:
            if name in self.out:
                self.out.remove(name)
                log.warning("%s is back", name)
                self._returned.set()
