# SPDX-License-Identifier: Apache-2.0
"""Health of the instances: ejected after failures, back when /health answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvtax.records.instances import Instance

from .upstream import Failure, Lost, Unreachable

POLL_EVERY_S = 1.0
# Failures in a row, of requests and polls together, that eject an instance; a good poll
# or answer ends the row. One refused connection is enough.
MAX_FAILURES = 3
# Seconds that an ejected instance stays out at least. They double each time that it is
# ejected again before it has answered a request: /health may be all it still answers.
MIN_OUT_S = 1.0
MAX_OUT_S = 32.0
log = logging.getLogger(__name__)
Probe = Callable[[Instance], Awaitable[None]]


class Health:
    """The ejected instances; the others count as healthy.

    `on_change(instance, healthy)` is called at every ejection and return.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        on_change: Callable[[str, bool], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._instances = instances
        self._now_ns = now_ns
        self._failures = {instance.name: 0 for instance in instances}
        self._out_s = {instance.name: MIN_OUT_S for instance in instances}
        self._back_at_ns = {instance.name: 0 for instance in instances}
        self._on_change = on_change
        self.ejected: set[str] = set()
        self.ejections = 0

    def succeeded(self, name: str) -> None:
        """Note that the instance has answered a request."""
        self._failures[name] = 0
        self._out_s[name] = MIN_OUT_S

    def failed(self, failure: Failure) -> None:
        """Note that a request or a poll has failed.

        Only failures count that show that the instance may be down: no answer does,
        whatever its status, and no failure of the proxy's own.
        """
        name = failure.instance
        if name is None or not isinstance(failure, Lost):
            return
        self._failures[name] += 1
        refused = isinstance(failure, Unreachable)
        if name not in self.ejected and (
            refused or self._failures[name] >= MAX_FAILURES
        ):
            self._eject(name, str(failure))

    def _eject(self, name: str, why: str) -> None:
        self.ejected.add(name)
        self.ejections += 1
        self._back_at_ns[name] = self._now_ns() + int(self._out_s[name] * 1e9)
        self._out_s[name] = min(MAX_OUT_S, 2 * self._out_s[name])
        log.warning("%s ejected: %s", name, why)
        if len(self.ejected) == len(self._instances):
            log.warning("all are ejected: requests go to them as if none were")
        self._on_change(name, False)

    async def poll_forever(self, probe: Probe) -> None:
        """Poll every instance until cancelled; `probe` raises Failure."""
        await asyncio.gather(
            *(self._poll(probe, instance) for instance in self._instances)
        )

    async def _poll(self, probe: Probe, instance: Instance) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            try:
                await probe(instance)
            except Failure as error:
                self.failed(error)
            else:
                self._answered(instance.name)

    def _answered(self, name: str) -> None:
        """Note that the instance's /health is good."""
        self._failures[name] = 0
        if name in self.ejected and self._now_ns() >= self._back_at_ns[name]:
            self.ejected.remove(name)
            log.warning("%s is back", name)
            self._on_change(name, True)
