# SPDX-License-Identifier: Apache-2.0
"""A timed connector is to everybody what it was."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import multiprocessing
import os
import pickle
import statistics
import threading
import time
from functools import cached_property
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.kvtax_probe import _wrap_factory, install
from vllm.kvtax_probe.connector import (
    CALLS_BEFORE_STEPS,
    FREQUENT_CALLS,
    ConnectorTimer,
    fill,
    timer_of,
    wrapper_cost,
)
from vllm.kvtax_probe.requests import RequestRecorder

from connectors.noop import NoopConnector

PATCHES = ["step_timing_v2"]


class Connector(NoopConnector):
    """Made without vLLM's config: its methods only add up what they are told."""

    kind = "a class attribute"

    def __init__(self):
        self.heard = []

    def tell(self, word, *, twice=False):
        """Say it."""
        self.heard += [word, word] if twice else [word]
        return len(self.heard)

    def tell_all(self, words):
        return [self.tell(word) for word in words]

    def later(self):
        yield from map(self.tell, "xy")

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
    own = {"tell", "tell_all", "later", "again", "of_the_class"}
    own |= {"build_connector_meta"}
    assert set(calls.methods) == own
    assert set(vars(connector)) == own | {"heard"}
    assert not calls.not_timed
    # Its other methods are vLLM's, or return at once.
    constant = {"constant", "of_nobody", "wait_for_save", "start_load_kv"}
    assert constant <= set(calls.constant)
    assert "bind_connector_metadata" not in {*calls.methods, *calls.constant}


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
    assert connector.heard == ["a", "b", "b", "c", "d", "private"]
    assert taken(calls).connector_calls == {"tell": 5, "tell_all": 1}


def test_a_generator_stays_lazy_and_its_work_has_its_time(calls, connector):
    items = connector.later()
    assert inspect.isgenerator(items) and inspect.isgeneratorfunction(connector.later)
    assert items.__name__ == "later"
    assert connector.heard == []
    assert next(items) == 1
    assert connector.heard == ["x"]
    items.close()
    assert list(items) == []
    step = taken(calls)
    assert step.connector_calls == {"later": 1, "tell": 1}
    assert step.connector_us["later"] > step.connector_us["tell"]


def test_a_generator_takes_values_and_errors_and_returns(calls):
    class Asked(Connector):
        def talk(self):
            got = []
            while len(got) < 3:
                try:
                    got.append((yield len(got)))
                except LookupError as error:
                    got.append(error)
            return got

    connector = Asked()
    calls.wrap(connector)
    talk = connector.talk()
    error = LookupError()
    assert [next(talk), talk.send("a"), talk.throw(error)] == [0, 1, 2]
    with pytest.raises(StopIteration) as end:
        talk.send("b")
    assert end.value.value == ["a", error, "b"]
    broken = connector.talk()
    next(broken)
    with pytest.raises(ValueError, match="mine"):
        broken.throw(ValueError("mine"))


def test_calls_in_other_threads_pass_by(calls, connector):
    thread = threading.Thread(target=connector.tell_all, args=(["a", "b"],))
    thread.start()
    thread.join()
    assert connector.heard == ["a", "b"]
    assert taken(calls).connector_calls == {}


class Hidden:
    def __get__(self, instance, owner=None):
        return self

    def __call__(self):
        return "hidden"

    @property
    def secret(self):
        raise LookupError("not for you")


class Unusual(Connector):
    """Has methods of every kind that a connector may have."""

    def __init__(self):
        super().__init__()
        self.get_finished = functools.partial(self.tell, "finished")

    def __setattr__(self, name, value):
        if name not in ("heard", "get_finished"):
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

    def gives(self):
        async def work():
            return self.tell("given")

        return work()

    class Called:
        def __call__(self):
            return "called"

    called, hidden = Called(), Hidden()


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
    assert asyncio.run(connector.gives()) == 6
    assert (connector.called(), connector.hidden()) == ("called", "hidden")
    # What it held of its own methods before it was timed is not timed.
    counts = taken(calls).connector_calls
    once = dict.fromkeys(("partly", "get_finished", "gives"), 1)
    assert counts == {"cached": 3, "tell": 5} | once
    assert set(calls.not_timed) == {"awaited", "called", "gives", "hidden"}
    assert calls.not_timed["hidden"] == "it cannot be wrapped: not for you"


class StoresInstance:
    """A decorator that keeps its instance, and can be called for that alone."""

    def __init__(self, function):
        self.function, self.instance = function, None

    def __get__(self, instance, owner=None):
        self.instance = instance
        return self

    def __call__(self, *args):
        return self.function(self.instance, *args)


class Described(Connector):
    """Has methods that are found by their instance alone."""

    def __init__(self):
        super().__init__()
        self.get_finished = functools.partial(self.tell, "finished")

    @functools.singledispatchmethod
    def dispatched(self, word):
        return self.tell(word)

    @dispatched.register
    def _(self, word: int):
        return self.tell(f"number {word}")

    @staticmethod
    def build_connector_meta(scheduler_output):
        return [scheduler_output].pop()

    @classmethod
    def of_all(cls, word):
        return cls.kind + word

    @StoresInstance
    def stored(self, word):
        return self.tell(word)


def test_methods_that_their_instance_finds_are_found_by_it_and_timed(calls):
    connector, signature = Described(), inspect.signature
    signatures = {
        name: signature(getattr(connector, name))
        for name in ("build_connector_meta", "of_all", "get_finished")
    }
    calls.wrap(connector)
    assert connector.dispatched("a") == 1
    assert connector.dispatched(5) == 2
    assert connector.stored("b") == 3
    assert connector.heard == ["a", "number 5", "b"]
    assert connector.build_connector_meta("it") == "it"
    assert connector.of_all("!") == "a class attribute!"
    assert taken(calls).connector_calls == {
        **{"tell": 3, "dispatched": 2, "stored": 1},
        **{"build_connector_meta": 1, "of_all": 1},
    }
    assert calls.not_timed == {}
    for name, known in signatures.items():
        assert signature(getattr(connector, name)) == known


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


def test_arguments_of_any_name_reach_the_method(calls):
    class Named(Connector):
        def given(self, self_=1, kvtax_self=2, **more):
            return self_, kvtax_self, more

        def two(self, first, second):
            return first, second

    connector = Named()
    calls.wrap(connector)
    assert connector.given(self_=5, kvtax_self=6, x=7) == (5, 6, {"x": 7})
    assert connector.given() == (1, 2, {})
    assert connector.two(second=2, first=1) == (1, 2)
    for wrong in ((), (1,), (1, 2, 3)):
        with pytest.raises(TypeError, match="two"):
            connector.two(*wrong)


def test_no_wrapper_is_on_in_a_step_that_is_not_recorded(calls):
    connector = Described()
    own = connector.get_finished
    calls.wrap(connector)
    calls.turn_off()
    assert vars(connector) == {"heard": [], "get_finished": own}
    connector.tell("a")
    calls.turn_on()
    connector.tell("b")
    assert connector.get_finished() == 3
    assert taken(calls).connector_calls == {"tell": 1, "get_finished": 1}


def test_the_wrappers_own_time_is_in_no_time_of_a_method(calls):
    """The median of many steps of 100 calls of an empty method."""

    class Empty(Connector):
        def empty(self, argument):
            return argument

        def many(self):
            for _ in range(100):
                self.empty(None)

    connector = Empty()
    calls.wrap(connector)
    empty_us, many_us, elapsed_us = [], [], []
    for _ in range(200):
        began_ns = time.perf_counter_ns()
        connector.many()
        elapsed_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        step = taken(calls)
        empty_us.append(step.connector_self_us["empty"] / 100)
        many_us.append(step.connector_us["many"])
    assert statistics.median(empty_us) < 0.5 * wrapper_cost().inside / 1e3
    saved_us = statistics.median(elapsed_us) - statistics.median(many_us)
    assert saved_us > 0.5 * 100 * wrapper_cost().timed / 1e3


def test_a_class_that_is_patched_later_is_followed(calls, connector, monkeypatch):
    monkeypatch.setattr(Connector, "tell", lambda self, word: f"patched {word}")
    assert connector.tell("a") == "patched a"
    assert taken(calls).connector_calls == {"tell": 1}


def test_a_shallow_copy_has_its_own_state_and_nothing_in_it_is_timed(calls, connector):
    other = copy.copy(connector)
    other.heard = []
    other.tell("to the copy")
    assert (other.heard, connector.heard) == (["to the copy"], [])
    assert set(vars(other)) == {"heard"}
    assert taken(calls).connector_calls == {}


def test_a_copy_has_the_callables_that_the_instance_had(calls):
    connector = Described()
    own = connector.get_finished
    calls.wrap(connector)
    assert copy.copy(connector).get_finished is own
    other = pickle.loads(pickle.dumps(connector))
    assert (other.get_finished(), other.heard) == (1, ["finished"])
    assert set(vars(other)) == {"heard", "get_finished"}


def test_what_took_the_place_of_a_method_stays(calls, connector):
    # A machine that is busy may make a call long.
    while len(calls.frequent) < 2:
        for _ in range(2 * FREQUENT_CALLS):
            connector.tell("a")
            connector.fetch = connector.again
            connector.again(0)
        taken(calls)
    connector.tell = lambda word: f"swapped {word}"
    del connector.again
    for drawn in (False, True, False):
        calls.draw(drawn)
        assert connector.tell("b") == "swapped b"
        assert "again" not in vars(connector)


def test_a_burst_of_arrivals_leaves_their_waits_recorded(calls):
    class Loads(Connector):
        def update_state_after_alloc(self, request, blocks, num_external_tokens):
            self.heard.append(request)

    connector = Loads()
    calls.wrap(connector)
    requests = RequestRecorder("a life", SimpleNamespace(connector=connector))
    requests.detached = False
    for drawn in (True, False, True):
        calls.draw(drawn)
        for number in range(2 * FREQUENT_CALLS):
            connector.update_state_after_alloc(number, None, 16)
        noted = [request for request, _ in requests.with_external_kv]
        assert noted == list(range(2 * FREQUENT_CALLS))
        requests.with_external_kv.clear()
        assert taken(calls).connector_calls["update_state_after_alloc"] == len(noted)


def test_connectors_that_know_each_other_are_timed_once(calls):
    outer, first, second = Connector(), Connector(), Connector()
    outer.inner = {"first": first, "second": second}
    outer.main, first.outer, second.sibling, second.me = first, outer, first, second
    calls.wrap(outer)
    for each in (outer, first, second):
        each.tell("a")
    names = {"tell", "Connector[0].tell", "Connector[1].tell"}
    assert {name for name in calls.methods if name.endswith("tell")} == names
    assert len(set(calls.methods)) == len(calls.methods)
    assert taken(calls).connector_calls == dict.fromkeys(names, 1)


def test_a_connector_whose_children_the_factory_makes_is_timed_once():
    class Factory:
        @classmethod
        def create_connector(cls, kind):
            return kind(cls)

    class Child(Connector):
        role = SimpleNamespace(name="MADE")

        def __init__(self, factory):
            super().__init__()

    class Outer(Child):
        def __init__(self, factory):
            super().__init__(factory)
            self.children = [factory.create_connector(Child) for _ in range(2)]

    _wrap_factory(SimpleNamespace(KVConnectorFactory=Factory))
    connector = Factory.create_connector(Outer)
    connector.children[1].tell("a")
    assert taken(timer_of("MADE")).connector_calls == {"Child[1].tell": 1}


def test_calls_that_no_step_takes_are_bounded(calls, connector):
    for _ in range(2 * CALLS_BEFORE_STEPS):
        connector.constant()
        connector.heard.clear()
        connector.tell("a")
    assert len(calls.calls) == CALLS_BEFORE_STEPS
    calls.stop()
    assert connector.tell("a") == 2
    assert taken(calls).connector_calls == {}


def test_a_fork_keeps_no_calls(calls, connector):
    calls.take()
    pid = os.fork()
    if not pid:
        heard = [connector.tell("a") for _ in range(10)]
        os._exit(heard != list(range(1, 11)) or len(calls.calls))
    assert os.waitpid(pid, 0)[1] == 0
    connector.tell("a")
    assert taken(calls).connector_calls == {"tell": 1}


def test_a_helper_process_can_be_started_with_a_method(connector):
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(connector.tell_all, (["a", "b"],)) == [1, 2]


def test_without_a_folder_nothing_is_wrapped(monkeypatch):
    from vllm.v1.engine.core import EngineCore

    monkeypatch.delenv("KVTAX_STEP_RECORDS_DIR", raising=False)
    step = EngineCore.step
    install()
    assert EngineCore.step is step
