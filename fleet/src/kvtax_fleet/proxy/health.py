# SPDX-License-Identifier: Apache-2.0
"""State of the instances: their health, and the models that they serve.

An instance is ejected after failures, and back by /health and by one request.

An instance that fails fast has nothing in flight, so policies that go by load would
send it nearly everything. Two rules eject. One is for an instance that may be down: it
refuses connections, goes silent or breaks off, requests and polls alike. The other is
for an outlier, whose answers fail where those of others do not, whatever their status.
A client may be to blame for a failed answer, so another instance answers the same
request before an outlier is ejected.

Time comes from a clock that the caller gives; only what is called forever sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtax_fleet.records.instances import Instance

from .upstream import Failure, Lost, Models, UnknownModel, Unreachable

POLL_EVERY_S = 1.0
# Failures in a row, of requests and polls together, that show that an instance may be
# down; a good poll or answer ends the row. One refused connection is enough.
MAX_FAILURES = 3
# An instance is suspect if so many of its last answers have failed (Envoy and
# vllm-router eject after 5 and 10 in a row).
WINDOW = 10
SUSPECT_FAILURES = 5
# Share of the instances that the rule for outliers may have ejected at once.
MAX_OUTLIERS_SHARE = 0.5
# Seconds that an ejected instance stays out at least. They double each time that it is
# ejected again before it is trusted: /health may be all it still answers.
MIN_OUT_S = 1.0
MAX_OUT_S = 32.0
# Good answers after its return until an instance is trusted as before.
TRUSTED_AFTER = 10
# Seconds between two readings of the models, and before one that a request causes.
MODELS_EVERY_S = 30.0
MODELS_AGAIN_S = 1.0
log = logging.getLogger(__name__)
Probe = Callable[[Instance], Awaitable[None]]
ListModels = Callable[[Instance], Awaitable[Models | None]]


class _State:
    """Health of one instance.

    `row`: failures in a row. `failed`: whether each of the last answers has failed.
    `good`: good answers since its return; None while it is trusted. `by_poll`: whether
    it returns by a good poll only. `on_trial`: back, and one request at a time until an
    answer begins; `trial` is that request's visit while it is under way.
    """

    def __init__(self) -> None:
        self.row = 0
        self.failed: deque[bool] = deque(maxlen=WINDOW)
        self.good: int | None = None
        self.out_s = MIN_OUT_S
        self.back_at_ns = 0
        self.by_poll = self.on_trial = False
        self.trial: object | None = None

    @property
    def suspect(self) -> bool:
        """True if its next failed answer may eject it."""
        return self.good is not None or self.failed.count(True) >= SUSPECT_FAILURES

    @property
    def failed_share(self) -> float:
        return sum(self.failed) / max(1, len(self.failed))


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
        self._states = {instance.name: _State() for instance in instances}
        self._on_change = on_change
        self.ejected: set[str] = set()
        self.ejections = 0

    def unavailable(self) -> set[str]:
        """Return the instances to leave out: ejected, or on trial with a request."""
        for name in list(self.ejected):
            if not self._states[name].by_poll:
                self._return(name)
        trials = {name for name, state in self._states.items() if state.trial}
        return self.ejected | trials

    @contextmanager
    def visit(self, name: str) -> Iterator[None]:
        """Send a request to the instance inside the context: its trial, if one is due.

        The trial ends as soon as an answer begins, or with the context. That must hold
        until another instance has answered in place of a suspect.
        """
        state, own = self._states[name], object()
        if state.on_trial and state.trial is None:
            state.trial = own
        try:
            yield
        finally:
            if state.trial is own:
                state.trial = None

    def begun(self, name: str) -> None:
        """Note that a good answer has begun."""
        self._states[name].on_trial, self._states[name].trial = False, None

    def answered(self, name: str, well: bool) -> bool:
        """Note a whole answer. Return whether a failed one makes the instance suspect.

        Then another instance should answer the request: `blame` or `acquit` follows.
        """
        state = self._states[name]
        state.row = 0
        state.failed.append(not well)
        if not well:
            return state.suspect
        if state.good is not None and name not in self.ejected:
            state.good += 1
            if state.good >= TRUSTED_AFTER:
                state.good, state.out_s = None, MIN_OUT_S
        return False

    def no_witnesses(self, suspect: str) -> set[str]:
        """Return the instances that may fail for the reason for which a suspect does.

        They are unavailable, not trusted, or fail at least as large a share.
        """
        share = self._states[suspect].failed_share
        return self.unavailable() | {
            name
            for name, state in self._states.items()
            if state.good is not None or state.failed_share >= share
        }

    def acquit(self, name: str) -> None:
        """Forget the failures of a suspect: another instance has failed alike."""
        self._states[name].failed.clear()

    def blame(self, name: str, why: str) -> None:
        """Eject a suspect, unless too many are out: another has answered well."""
        outliers = len(self.ejected) + 1
        if outliers <= MAX_OUTLIERS_SHARE * len(self._instances):
            self._eject(name, why)

    def failed(self, failure: Failure) -> bool:
        """Note the failure of a request. Return as `answered`.

        The proxy's own failures do not count. An instance that may be down is ejected.
        """
        name = failure.instance
        if name is None:
            return False
        if not isinstance(failure, Lost):
            return self.answered(name, well=False)
        state = self._states[name]
        state.failed.append(True)
        self._lost(failure, 1 if state.suspect else MAX_FAILURES)
        return False

    def broke(self, name: str, why: str) -> None:
        """Note an answer that has failed after its beginning.

        No other instance can answer that request, so it is the others' answers that a
        suspect is compared with.
        """
        if self.answered(name, well=False) and self._others_do_better(name):
            self.blame(name, why)

    def _others_do_better(self, name: str) -> bool:
        """Return whether the others' share of failed answers is below half of its."""
        others = [
            failed
            for other, state in self._states.items()
            if other != name
            for failed in state.failed
        ]
        limit = self._states[name].failed_share / 2
        return bool(others) and sum(others) / len(others) < limit

    def _lost(self, failure: Lost, limit: int) -> None:
        """Eject an instance that may be down after `limit` failures in a row."""
        name = failure.instance
        if name is None:
            return
        state = self._states[name]
        state.row += 1
        if isinstance(failure, Unreachable) or state.row >= limit:
            self._eject(name, str(failure))
            state.by_poll = True

    def _eject(self, name: str, why: str) -> None:
        if name in self.ejected:
            return
        state = self._states[name]
        self.ejected.add(name)
        self.ejections += 1
        state.back_at_ns = self._now_ns() + int(state.out_s * 1e9)
        state.out_s = min(MAX_OUT_S, 2 * state.out_s)
        state.good, state.by_poll, state.trial = 0, False, None
        state.failed.clear()
        log.warning("%s ejected: %s", name, why)
        if len(self.ejected) == len(self._instances):
            log.warning("all are ejected: requests go to them as if none were")
        self._on_change(name, False)

    def _return(self, name: str) -> None:
        """Take an ejected instance back if it has been out for long enough."""
        state = self._states[name]
        if self._now_ns() < state.back_at_ns:
            return
        self.ejected.remove(name)
        state.on_trial, state.good = True, 0
        log.warning("%s is back, with one request until an answer begins", name)
        self._on_change(name, True)

    async def poll_forever(self, probe: Probe) -> None:
        """Poll every instance until cancelled; `probe` raises Failure."""
        await asyncio.gather(
            *(self._poll(probe, instance) for instance in self._instances)
        )

    async def _poll(self, probe: Probe, instance: Instance) -> None:
        name = instance.name
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            try:
                await probe(instance)
            except Lost as error:
                self._lost(error, MAX_FAILURES)
            except Exception:  # and the next poll may be good
                log.exception("/health of %s", name)
            else:
                self._states[name].row = 0
                if name in self.ejected:
                    self._return(name)


class Served:
    """The models that the instances list; one that lists none counts as serving any."""

    def __init__(
        self,
        instances: Sequence[Instance],
        list_models: ListModels,
        now_ns: Callable[[], int],
    ) -> None:
        self._instances = instances
        self._list_models = list_models
        self._now_ns = now_ns
        self._read_ns = 0
        self._lock = asyncio.Lock()
        self._models: dict[str, Models] = {}

    @property
    def same(self) -> bool:
        """True if all lists are the same."""
        first, *others = self._models.values() or ({},)
        return all(models.keys() == first.keys() for models in others)

    def together(self) -> Models:
        """Return the models of all instances."""
        lists = (self._models.get(each.name, {}) for each in self._instances)
        return {name: model for models in lists for name, model in models.items()}

    async def lacking(self, model: str | None) -> set[str]:
        """Return the instances that do not serve the model. Raises UnknownModel.

        Where all lists are the same, an instance decides: it may yet load the model.
        """
        if model is None or self.same:
            return set()
        lacking = self._lacking(model)
        if len(lacking) == len(self._instances):
            async with self._lock:
                if self._now_ns() - self._read_ns >= MODELS_AGAIN_S * 1e9:
                    await self.read()
            lacking = self._lacking(model)
        if len(lacking) == len(self._instances):
            raise UnknownModel(model)
        return lacking

    def _lacking(self, model: str) -> set[str]:
        return {name for name, models in self._models.items() if model not in models}

    async def read(self) -> None:
        """Read the lists of all instances; one that does not answer keeps its own."""
        self._read_ns = self._now_ns()
        lists = await asyncio.gather(*map(self._list_models, self._instances))
        for instance, models in zip(self._instances, lists, strict=True):
            if models is not None:
                self._models[instance.name] = models

    async def read_forever(self) -> None:
        """Read the lists at intervals until cancelled."""
        while True:
            await asyncio.sleep(MODELS_EVERY_S)
            await self.read()
