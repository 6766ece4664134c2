# SPDX-License-Identifier: Apache-2.0
"""A timed connector is to everybody what it was."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import multiprocessing
import threading
import time
from functools import cached_property
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.kvtax_probe import install
from vllm.kvtax_probe.connector import (
    FREQUENT_CALLS,
    STEP_METHODS,
    ConnectorTimer,
    fill,
)

from connectors.noop import NoopConnector

PATCHES = ["step_timing_v2"]


class Connector(NoopConnector):
    """Made without vLLM's config: its methods only add up what they are told."""

    kind = "a class attribute"

    def __init__(self):
        self.told = []

    def tell(self, word, *, twice=False):
        """Say it."""
        self.told += [word, word] if twice else [word]
        return len(self.told)

    def tell_all(self, words):
        return [self.tell(word) for word in words]

    def later(self):
        yield from map(self.tell, "xy")

    def fail(self):
        self.tell("failing")
        raise LookupError("as told")

    def again(self, depth):
        return self.again(depth - 1) if depth else self.tell("bottom")

    def constant(self):
        """Takes no time."""
        return False, None

    def _private(self):
        return self.tell("private")

    @property
    def is_asked(self):
        raise AssertionError("nobody asked")

    @cached_property
    def is_asked_once(self):
        raise AssertionError("nobody asked")

    @staticmethod
    def of_nobody():
        return "static"

    @classmethod
    def of_the_class(cls):
        return cls.kind


@pytest.fixture
def calls():
    return ConnectorTimer()


@pytest.fixture
def connector(calls):
    made = Connector()
    calls.wrap(made)
    return made


def taken(calls) -> SimpleNamespace:
    """Calls and times by method since the last time, with none left out."""
    record = SimpleNamespace()
    fill(record, calls.take(), calls.methods, {})
    self_us = record.connector_self_us or {}
    return SimpleNamespace(
        connector_calls=dict.fromkeys(self_us, 1) | (record.connector_calls or {}),
        connector_us=self_us | (record.connector_us or {}),
        connector_self_us=self_us,
    )


def test_public_methods_are_timed_and_nothing_else(calls, connector):
    own = {"tell", "tell_all", "later", "fail", "again"}
    # They have fields of their own; NoopConnector's other methods return at once.
    steps = {name for name in STEP_METHODS if hasattr(connector, name)}
    assert set(calls.methods) == own | steps
    assert set(vars(connector)) == own | steps | {"told"}
    assert not calls.not_timed


def test_it_stays_what_it_was(connector):
    assert type(connector) is Connector
    assert isinstance(connector, KVConnectorBase_V1)
    assert supports_hma(connector)
    assert inspect.signature(connector.tell) == inspect.signature(Connector().tell)
    assert connector.tell.__name__ == "tell"
    assert connector.tell.__doc__ == "Say it."
    assert connector.of_nobody() == "static"
    assert connector.of_the_class() == "a class attribute"
    assert "tell" not in vars(Connector()), "the class is not changed"


def test_calls_do_and_return_what_they_did(calls, connector):
    assert connector.tell("a") == 1
    assert connector.tell("b", twice=True) == 3
    assert connector.tell_all(["c", "d"]) == [4, 5]
    assert connector.constant() == (False, None)
    assert connector._private() == 6
    assert connector.told == ["a", "b", "b", "c", "d", "private"]
    assert taken(calls).connector_calls == {"tell": 5, "tell_all": 1}


def test_a_call_that_raises_is_counted_and_raises(calls, connector):
    for _ in range(2):
        with pytest.raises(LookupError, match="as told"):
            connector.fail()
    step = taken(calls)
    assert step.connector_calls == {"fail": 2, "tell": 2}
    self_us = step.connector_self_us
    total_us = step.connector_us["fail"]
    assert self_us["fail"] == pytest.approx(total_us - self_us["tell"])


def test_a_generator_stays_lazy_and_its_work_has_its_time(calls, connector):
    items = connector.later()
    assert connector.told == []
    assert next(items) == 1
    assert connector.told == ["x"]
    items.close()
    assert list(items) == []
    step = taken(calls)
    assert step.connector_calls == {"later": 1, "tell": 1}
    assert step.connector_us["later"] > step.connector_us["tell"]


def test_of_a_method_that_calls_itself_no_time_is_its_own_twice(calls, connector):
    connector.again(5)
    _, _, began_ns, ended_ns = calls.calls[-1]  # the outermost
    step = taken(calls)
    assert step.connector_calls == {"again": 6, "tell": 1}
    assert sum(step.connector_self_us.values()) == pytest.approx(
        (ended_ns - began_ns) / 1e3
    )
    assert step.connector_us["again"] > (ended_ns - began_ns) / 1e3


def test_calls_in_other_threads_pass_by(calls, connector):
    thread = threading.Thread(target=connector.tell_all, args=(["a", "b"],))
    thread.start()
    thread.join()
    assert connector.told == ["a", "b"]
    assert taken(calls).connector_calls == {}


def test_calls_are_taken_once(calls, connector):
    connector.tell("a")
    assert taken(calls).connector_calls == {"tell": 1}
    assert taken(calls).connector_calls == {}


class Unusual(Connector):
    """Has methods of every kind that a connector may have."""

    def __init__(self):
        super().__init__()
        self.get_finished = functools.partial(self.tell, "finished")

    def __setattr__(self, name, value):
        if name not in ("told", "get_finished"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    @functools.lru_cache  # noqa: B019
    def cached(self, word):
        return self.tell(word)

    def once(self, word):
        return self.tell(word)

    partly = functools.partialmethod(once, "partly")

    async def awaited(self):
        return self.tell("awaited")

    class Called:
        def __call__(self):
            return "called"

    called = Called()


def test_methods_of_every_kind_do_what_they_did(calls):
    connector = Unusual()
    calls.wrap(connector)
    assert connector.cached("a") == connector.cached("a") == 1
    assert connector.cached.cache_info().hits == 1
    connector.cached.cache_clear()
    assert connector.cached("a") == 2
    assert connector.partly() == 3
    assert connector.get_finished() == 4
    assert asyncio.run(connector.awaited()) == 5
    assert connector.called() == "called"
    # What it held of its own methods before it was timed is not timed.
    counts = taken(calls).connector_calls
    assert counts == {"cached": 3, "partly": 1, "get_finished": 1, "tell": 4}
    assert set(calls.not_timed) == {"awaited", "called"}


class Slotted:
    """No class of vLLM's, and without a __dict__."""

    __slots__ = ()

    def work(self):
        return ["done"].pop()


def test_what_cannot_be_timed_is_named_with_the_reason(calls):
    connector = Slotted()
    calls.wrap(connector)
    assert connector.work() == "done"
    assert calls.methods == []
    assert calls.not_timed == {"work": "the connector's attributes cannot be set"}


def test_a_class_that_is_patched_later_is_followed(calls, connector, monkeypatch):
    monkeypatch.setattr(Connector, "tell", lambda self, word: f"patched {word}")
    assert connector.tell("a") == "patched a"
    assert taken(calls).connector_calls == {"tell": 1}


def test_a_copy_has_its_own_state(connector):
    other = copy.deepcopy(connector)
    other.tell("to the copy")
    assert (other.told, connector.told) == (["to the copy"], [])


def test_a_helper_process_can_be_started_with_a_method(connector):
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(connector.tell_all, (["a", "b"],)) == [1, 2]


def test_a_method_of_each_layer_is_counted_always_and_timed_in_drawn_steps(
    calls, connector
):
    for number in range(6):
        calls.draw(number % 3 == 0)
        for _ in range(4 * FREQUENT_CALLS):
            connector.tell("a")
        step = taken(calls)
        assert step.connector_calls == {"tell": 4 * FREQUENT_CALLS}
        assert ("tell" in step.connector_us) == (number % 3 == 0), number


def test_a_method_that_takes_long_is_timed_however_often_it_is_called(calls):
    class Slow(Connector):
        def tell(self, word):
            time.sleep(0.0001)

    connector = Slow()
    calls.wrap(connector)
    for number in range(4):
        calls.draw(drawn=number == 0)
        for _ in range(2 * FREQUENT_CALLS):
            connector.tell("a")
        assert taken(calls).connector_us["tell"] > 2 * FREQUENT_CALLS * 100


def test_without_a_folder_nothing_is_wrapped(monkeypatch):
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delenv("KVTAX_STEP_RECORDS_DIR", raising=False)
    step = EngineCore.step
    install()
    assert EngineCore.step is step
