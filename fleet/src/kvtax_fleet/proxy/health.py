# SPDX-License-Identifier: Apache-2.0
"""State of the instances: their health, and the models that they serve.

An instance that is down refuses connections or fails polls of /health; it is back with
a good poll. An outlier answers polls and fails requests: it would have nothing in
flight, so that policies that go by load would send it nearly everything. A client may
be to blame for a failed answer, so an outlier is ejected only after another instance
has answered the same request. One that serves other models well, as where an adapter is
broken, is out for that model alone.

Time comes from a clock that the caller gives; only what is called forever sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from kvtax_fleet.proxy.exchange import Failure, Lost, UnknownModel, Unreachable
from kvtax_fleet.records.instances import Instance

POLL_EVERY_S = 1.0
# Failed polls in a row that show that an instance is down.
MAX_FAILED_POLLS = 3
# An instance is suspect if so many of its last answers have failed (Envoy and
# vllm-router eject after 5 and 10 in a row), for this share of its last senders.
WINDOW = 10
SUSPECT_FAILURES = 5
SUSPECT_SENDERS_SHARE = 0.5
# Share of the instances that may be out as outliers.
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
# Models whose outcomes at an instance are remembered; clients name them.
MAX_MODELS = 1024
log = logging.getLogger(__name__)
# An instance, and None for all of it or one of its models.
Key = tuple[str, str | None]
Probe = Callable[[Instance], Awaitable[None]]
# By name, as /v1/models has them.
Models = dict[str, dict[str, Any]]
# Returns None for an instance that lists none; raises OSError without an answer.
ListModels = Callable[[Instance], Awaitable[Models | None]]


class _State:
    """Health of one instance, or of one model at it.

    `failed_polls`: in a row. `failed`: whether each of the last answers has failed;
    `senders`: the same of the last answer to each sender. `good`: good answers since
    its return; None while it is trusted. `is_down`: whether it returns by a good poll
    only. `on_trial`: back, and one request at a time until an answer begins, or ends if
    it was out for answers that ended badly (`to_end`); `trial` is that attempt while it
    is under way. `waiting`: limits of attempts without an answer.
    """

    def __init__(self) -> None:
        self.failed_polls = 0
        self.failed: deque[bool] = deque(maxlen=WINDOW)
        self.senders: OrderedDict[str, bool] = OrderedDict()
        self.good: int | None = None
        self.out_s = MIN_OUT_S
        self.back_at_ns = 0
        self.is_down = self.on_trial = self.to_end = False
        self.trial: object | None = None
        self.waiting: set[asyncio.Timeout] = set()

    def add(self, sender: str, failed: bool) -> None:
        self.failed.append(failed)
        self.senders[sender] = failed
        self.senders.move_to_end(sender)
        if len(self.senders) > WINDOW:
            self.senders.popitem(last=False)

    def clear(self) -> None:
        self.failed.clear()
        self.senders.clear()

    @property
    def is_suspect(self) -> bool:
        """True if its next failed answer may eject it."""
        if self.good is not None:
            return True
        share = sum(self.senders.values()) / max(1, len(self.senders))
        failures = self.failed.count(True)
        return failures >= SUSPECT_FAILURES and share >= SUSPECT_SENDERS_SHARE

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
        self._of_models: OrderedDict[Key, _State] = OrderedDict()
        self._on_change = on_change
        self._polled: set[str] = set()
        self.ejected: set[str] = set()
        self._ejected_for: set[Key] = set()
        self.ejections = 0

    def follow(self, instances: Sequence[Instance]) -> None:
        """Replace the instances; one that stays as it was keeps its state."""
        kept = set(self._instances) & set(instances)
        states = {instance.name: self._states[instance.name] for instance in kept}
        self._instances = instances
        self._states = {
            instance.name: states.get(instance.name) or _State()
            for instance in instances
        }
        self.ejected &= states.keys()
        self._ejected_for = {key for key in self._ejected_for if key[0] in states}
        for key in [key for key in self._of_models if key[0] not in states]:
            del self._of_models[key]

    def unavailable(self, model: str | None) -> set[str]:
        """Return the instances to leave out: ejected, or on trial with a request."""
        for name in list(self.ejected):
            if not self._states[name].is_down:
                self._return((name, None))
        for key in list(self._ejected_for):
            self._return(key)
        out = self.ejected | {name for name, of in self._ejected_for if of == model}
        return out | {
            name
            for name in self._states
            if any(state.trial for state in self._both(name, model))
        }

    @contextmanager
    def attempt(self, name: str, model: str | None) -> Iterator[None]:
        """Send a request to the instance inside the context: its trial, if one is due.

        The trial ends as soon as an answer begins, or with the context. That must hold
        until another instance has answered in place of a suspect.
        """
        own = object()
        states = self._both(name, model)
        for state in states:
            if state.on_trial and state.trial is None:
                state.trial = own
        try:
            yield
        finally:
            for state in states:
                if state.trial is own:
                    state.trial = None

    @asynccontextmanager
    async def until_down(self, name: str) -> AsyncIterator[None]:
        """Wait for an instance's answer inside the context. Raises Lost if it is down.

        An answer may take as long as its client waits, so there is no other limit.
        """
        state = self._state(name)
        try:
            async with asyncio.timeout(None) as limit:
                state.waiting.add(limit)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Lost(502, name, f"{name} is down: its polls fail") from None
        finally:
            state.waiting.discard(limit)

    def begun(self, name: str, model: str | None) -> None:
        """Note that a good answer has begun."""
        for state in self._both(name, model):
            if not state.to_end:
                state.on_trial, state.trial = False, None

    def answered(self, name: str, model: str | None, sender: str, well: bool) -> bool:
        """Note a whole answer. Return whether a failed one makes the instance suspect.

        Then another instance should answer the request, and `judge` follows.
        """
        states = self._both(name, model)
        for state in states:
            state.add(sender, not well)
            if well:
                state.on_trial = state.to_end = False
            if well and state.good is not None and name not in self.ejected:
                state.good += 1
                if state.good >= TRUSTED_AFTER:
                    state.good, state.out_s = None, MIN_OUT_S
        return not well and any(state.is_suspect for state in states)

    def suspects(self, names: Iterable[str], model: str | None) -> set[str]:
        """Return those of the instances whose next failed answer may eject them."""
        return {
            name
            for name in names
            if any(state.is_suspect for state in self._both(name, model))
        }

    def without_better_record(self, suspect: str, model: str | None) -> set[str]:
        """Return the instances that may fail for the reason for which a suspect does.

        They are unavailable, not trusted, or fail at least as large a share.
        """
        share = self._both(suspect, model)[-1].failed_share
        return self.unavailable(model) | {
            name
            for name in self._states
            for state in [self._both(name, model)[-1]]
            if state.good is not None or state.failed_share >= share
        }

    def clear(self, name: str, model: str | None) -> None:
        """Forget the failures of an instance: another has failed alike."""
        for state in self._both(name, model):
            state.clear()

    def judge(self, failed: Iterable[str], model: str | None, well: bool) -> None:
        """Pass a verdict on suspects in whose place another has answered."""
        for name in failed:
            if well:
                why = "it fails requests that another has answered"
                self.mark_outlier(name, model, why)
            else:
                self.clear(name, model)

    def mark_outlier(
        self, name: str, model: str | None, why: str, to_end: bool = False
    ) -> None:
        """Eject a suspect, unless too many are out: another has answered well.

        `to_end`: its answers fail after their beginning, or do not begin.
        """
        if not self.suspects([name], model):
            return
        key = (name, model if self._serves_others_well(name, model) else None)
        out = self.ejected | {name for name, of in self._ejected_for if of == key[1]}
        if len(out - {name}) + 1 <= MAX_OUTLIERS_SHARE * len(self._instances):
            self._eject(key, why)
            self._both(*key)[-1].to_end = to_end

    def _serves_others_well(self, name: str, model: str | None) -> bool:
        return any(
            other == name and of != model and state.failed and not state.failed[-1]
            for (other, of), state in self._of_models.items()
        )

    def failed(self, failure: Failure, model: str | None, sender: str) -> bool:
        """Note the failure of a request. Return as `answered`.

        The proxy's own failures do not count. An instance that refuses connections is
        down.
        """
        name = failure.instance
        if name is None:
            return False
        if isinstance(failure, Unreachable):
            self._down(name, failure)
            return False
        return self.answered(name, model, sender, well=False)

    def _both(self, name: str, model: str | None) -> list[_State]:
        own = self._state(name)
        if model is None or name not in self._states:
            return [own]
        state = self._of_models.setdefault((name, model), _State())
        self._of_models.move_to_end((name, model))
        if len(self._of_models) > MAX_MODELS:
            key, _ = self._of_models.popitem(last=False)
            self._ejected_for.discard(key)
        return [own, state]

    def _state(self, name: str) -> _State:
        """Return an instance's state, a new one if it has been taken out meanwhile."""
        return self._states.get(name) or _State()

    def _down(self, name: str, failure: Failure) -> None:
        if name in self._states:
            self._eject((name, None), str(failure))
            self._states[name].is_down = True

    def _eject(self, key: Key, why: str) -> None:
        name, model = key
        if name in self.ejected or name not in self._states:
            return
        state = self._both(name, model)[-1]
        if model is None:
            self.ejected.add(name)
        else:
            self._ejected_for.add(key)
        self.ejections += 1
        state.back_at_ns = self._now_ns() + int(state.out_s * 1e9)
        state.out_s = min(MAX_OUT_S, 2 * state.out_s)
        state.good, state.is_down, state.trial = 0, False, None
        state.clear()
        of = "" if model is None else f" for model {model!r}"
        log.warning("%s ejected%s: %s", name, of, why)
        if model is not None:
            return
        if len(self.ejected) == len(self._instances):
            log.warning("all are ejected: requests go to them as if none were")
        self._on_change(name, False)

    def _return(self, key: Key) -> None:
        name, model = key
        state = self._both(name, model)[-1]
        if self._now_ns() < state.back_at_ns:
            return
        self.ejected.discard(name) if model is None else self._ejected_for.discard(key)
        state.on_trial, state.good = True, 0
        log.warning("%s is back, with one request at a time", name)
        if model is None:
            self._on_change(name, True)

    async def poll_forever(self, probe: Probe) -> None:
        """Poll every instance until cancelled; `probe` raises Failure."""
        async with asyncio.TaskGroup() as polls:
            while True:
                await asyncio.sleep(POLL_EVERY_S)
                for instance in self._instances:
                    if instance.name not in self._polled:
                        polls.create_task(self.poll(probe, instance))

    async def poll(self, probe: Probe, instance: Instance) -> None:
        """Poll an instance."""
        name = instance.name
        self._polled.add(name)
        try:
            await probe(instance)
        except Lost as error:
            if instance in self._instances:
                self._failed_poll(name, error)
        except Exception:  # and the next poll may be good
            log.exception("/health of %s", name)
        else:
            self._state(name).failed_polls = 0
            if name in self.ejected:
                self._return((name, None))
        finally:
            self._polled.discard(name)

    def _failed_poll(self, name: str, failure: Lost) -> None:
        """Eject an instance that is down, and end the attempts that wait for it."""
        if failure.instance is None:
            return
        state = self._states[name]
        state.failed_polls += 1
        is_down = state.failed_polls == MAX_FAILED_POLLS
        if is_down or isinstance(failure, Unreachable):
            self._down(name, failure)
        while is_down and state.waiting:
            state.waiting.pop().reschedule(0)


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
        # Of the instances that have answered; None for one that lists none.
        self._models: dict[Instance, Models | None] = {}

    def follow(self, instances: Sequence[Instance]) -> None:
        """Replace the instances; the lists of those that stay are kept."""
        self._instances = instances
        self._models = {
            instance: models
            for instance, models in self._models.items()
            if instance in instances
        }

    def is_read(self, instance: Instance) -> bool:
        return instance in self._models

    @property
    def same(self) -> bool:
        """True if all lists have been read and are the same."""
        if len(self._models) < len(self._instances):
            return False
        first, *others = (*filter(None, self._models.values()),) or ({},)
        return all(models.keys() == first.keys() for models in others)

    def together(self) -> Models:
        """Return the models of all instances."""
        lists = (self._models.get(each) or {} for each in self._instances)
        return {name: model for models in lists for name, model in models.items()}

    async def lacking(self, model: str | None) -> set[str]:
        """Return the instances that do not serve the model. Raises UnknownModel.

        Where all lists are the same, an instance decides: it may yet load the model.
        """
        if model is None or self.same:
            return set()
        lacking = self._lacking(model)
        if len(lacking) == len(self._instances):
            await self.read_again()
            lacking = self._lacking(model)
        if len(lacking) == len(self._instances):
            raise UnknownModel(model)
        return lacking

    def _lacking(self, model: str) -> set[str]:
        """Return those that do not list the model, or may, if another does."""
        listed = [each for each, models in self._models.items() if models]
        serving = [each for each in listed if model in (self._models[each] or ())]
        unread = [each for each in self._instances if each not in self._models]
        left_out = {*listed} - {*serving} | {*(unread if serving else ())}
        return {instance.name for instance in left_out}

    async def read_again(self) -> None:
        """Read all lists, unless they have just been read."""
        async with self._lock:
            if self._now_ns() - self._read_ns >= MODELS_AGAIN_S * 1e9:
                await self.read()

    async def read(self) -> None:
        """Read the lists of all instances; one that does not answer keeps its own."""
        self._read_ns = self._now_ns()
        await asyncio.gather(*map(self.read_of, self._instances))

    async def read_of(self, instance: Instance) -> None:
        """Read the list of an instance."""
        try:
            models = await self._list_models(instance)
        except OSError:
            return
        if instance in self._instances:
            self._models[instance] = models

    async def read_forever(self) -> None:
        """Read the lists at intervals until cancelled."""
        while True:
            await asyncio.sleep(MODELS_EVERY_S)
            await self.read()
