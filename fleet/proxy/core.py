# SPDX-License-Identifier: Apache-2.0
"""The proxy without HTTP: what it decides, counts and remembers, by any clock.

`app.py` puts it behind a port; in virtual time it stands in front of simulated
instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from fleet.policies import parameters_of
from lab.records.instances import Instance

from .decision_log import DecisionLog
from .handler import Handler
from .health import Health
from .kvindexd import Exact
from .loads import FleetLoad
from .mirror import Mirror
from .offload import Offloader
from .pins import Pins
from .router import Router
from .settings import Settings
from .shared import Seat
from .upstream import Upstream


class Core:
    """`settings` as resolved. `exact` is None without `--cache exact`, `seat` for a
    proxy of one process.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        settings: Settings,
        upstream: Upstream,
        decisions: DecisionLog,
        exact: Exact | None = None,
        now_ns: Callable[[], int] = monotonic_ns,
        seat: Seat | None = None,
    ) -> None:
        count = len(instances)
        self.instances = instances
        self.place = {one.name: place for place, one in enumerate(instances)}
        if seat is None:
            self.loads, pins = FleetLoad(self.place), Pins()
        else:
            self.loads = FleetLoad(self.place, seat.shared.loads, seat.place)
            pins = seat.shared.pins
        self.health = Health(instances, self._on_health, now_ns)
        self.mirror = Mirror(count, settings.mirror_tokens)
        self.router = Router(
            instances,
            settings.policy,
            parameters_of(settings.policy, settings.parameters),
            self.mirror,
            self.loads,
            pins,
            decisions,
            now_ns,
        )
        self.offloader = Offloader(
            upstream,
            self.loads,
            self.health,
            settings.prefill_timeout_s,
            settings.handover_timeout_s,
            now_ns,
        )
        self.handler = Handler(
            upstream,
            {one.name: one for one in instances},
            self.router,
            exact,
            self.loads,
            self.health,
            self.offloader,
            decisions,
            now_ns,
        )

    def _on_health(self, name: str, healthy: bool) -> None:
        """An instance that is away may be restarted, with an empty cache."""
        if not healthy:
            self.mirror.clear(self.place[name])
