# SPDX-License-Identifier: Apache-2.0
"""A timed connector is to everybody what it was."""

from __future__ import annotations

import inspect
import threading
from functools import cached_property
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import step_records
from vllm.v1.step_connector import ConnectorCalls

from connectors.noop import NoopConnector

PATCHES = ["step_timing_v1", "step_timing_v2"]


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
    return ConnectorCalls()


@pytest.fixture
def connector(calls):
    made = Connector()
    calls.wrap(made)
    return made


def taken(calls) -> SimpleNamespace:
    step = SimpleNamespace(connector_calls=None)
    calls.move_to(step)
    return step


def test_public_methods_are_timed_and_nothing_else(calls, connector):
    own = {"tell", "tell_all", "later", "fail", "again"}
    # As NoopConnector has it; its other methods return at once.
    assert set(calls.methods) == own | {"build_connector_meta"}
    assert set(vars(connector)) == own | {"build_connector_meta", "told"}


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


def test_a_generator_runs_in_its_own_time(calls, connector):
    items = connector.later()
    step = taken(calls)
    assert step.connector_calls == {"later": 1, "tell": 2}
    assert list(items) == [1, 2]


def test_of_a_method_that_calls_itself_no_time_is_its_own_twice(calls, connector):
    connector.again(5)
    step = taken(calls)
    assert step.connector_calls == {"again": 6, "tell": 1}
    assert sum(step.connector_self_us.values()) == pytest.approx(calls.self_ns / 1e3)
    assert step.connector_us["again"] > calls.self_ns / 1e3


def test_calls_in_other_threads_pass_by(calls, connector):
    thread = threading.Thread(target=connector.tell_all, args=(["a", "b"],))
    thread.start()
    thread.join()
    assert connector.told == ["a", "b"]
    assert taken(calls).connector_calls is None


def test_calls_are_taken_once_and_added_to_what_a_step_has(calls, connector):
    connector.tell("a")
    step = taken(calls)
    connector.tell("b")
    calls.move_to(step)
    assert step.connector_calls == {"tell": 2}
    assert taken(calls).connector_calls is None


def test_without_recording_a_connector_is_left_alone():
    assert step_records.ENGINE_STEPS is None
    connector = Connector()
    assert step_records.timed(connector, KVConnectorRole.WORKER) is connector
    assert set(vars(connector)) == {"told"}
