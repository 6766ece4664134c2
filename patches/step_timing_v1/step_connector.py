# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
The calls of a connector's methods, timed, whatever the connector or release has.

A wrapper is an attribute of the instance and shadows the method. The class stays as
it is, and so does all that isinstance() says.
"""

import dis
import functools
import inspect
import threading
import time
from collections.abc import Callable
from types import GeneratorType
from typing import Any

now_ns = time.perf_counter_ns

# The code of a method that does no more than return a constant.
_CONSTANT = {"RESUME", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_VALUE", "RETURN_CONST"}


class _Method:
    """One method, and its calls since a step last took them."""

    __slots__ = ("calls", "name", "ns", "self_ns")

    def __init__(self, name: str):
        self.name = name
        self.calls = self.ns = self.self_ns = 0


class ConnectorCalls:
    """All timed calls on one side, the scheduler's or the worker's.

    Only calls in `thread` count; those in others may overlap, and pass by. `self_ns` is
    the time of all calls so far. What it grows by within a call was its children's.
    """

    __slots__ = ("_called", "methods", "self_ns", "thread")

    def __init__(self):
        self._called: list[_Method] = []
        self.methods: list[str] = []
        self.self_ns = 0
        self.thread = threading.get_ident()

    def wrap(self, connector: Any, prefix: str = "") -> None:
        """Time the connector's public methods from now on, named with a prefix."""
        for name in dir(type(connector)):
            if _is_timed(connector, name):
                method = _Method(prefix + name)
                self.methods.append(method.name)
                setattr(connector, name, self._timed(getattr(connector, name), method))

    def move_to(self, step: Any) -> None:
        """Add the calls since the last one of this to a record."""
        if not self._called:
            return
        if step.connector_calls is None:
            step.connector_calls, step.connector_us, step.connector_self_us = {}, {}, {}
        calls, time_us = step.connector_calls, step.connector_us
        self_us = step.connector_self_us
        for method in self._called:
            name = method.name
            calls[name] = calls.get(name, 0) + method.calls
            time_us[name] = time_us.get(name, 0) + method.ns / 1e3
            self_us[name] = self_us.get(name, 0) + method.self_ns / 1e3
            method.calls = method.ns = method.self_ns = 0
        self._called.clear()

    def _timed(self, call: Callable, method: _Method) -> Callable:
        get_ident, called = threading.get_ident, self._called.append

        def timed_call(*args, **kwargs):
            if get_ident() != self.thread:
                return call(*args, **kwargs)
            before_ns = self.self_ns
            began_ns = now_ns()
            try:
                result = call(*args, **kwargs)
                if type(result) is GeneratorType:
                    # Run now, or what it does would be nobody's time.
                    result = iter(list(result))
                return result
            finally:
                took_ns = now_ns() - began_ns
                if not method.calls:
                    called(method)
                method.calls += 1
                method.ns += took_ns
                method.self_ns += took_ns - self.self_ns + before_ns
                self.self_ns = before_ns + took_ns

        return functools.update_wrapper(timed_call, call)


def _is_timed(connector: Any, name: str) -> bool:
    """Public instance methods, except those that can take no time.

    These are the methods that only return a constant, and those inherited from the
    base class. Attention calls some of them twice a layer, and a wrapper would cost
    ten times as much as they do.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if name.startswith("_"):
        return False
    found = inspect.getattr_static(connector, name)
    if not callable(found) or isinstance(found, (staticmethod, type)):
        return False
    if found is inspect.getattr_static(KVConnectorBase_V1, name, None):
        return False
    code = getattr(found, "__code__", None)
    return code is None or not _CONSTANT.issuperset(
        instruction.opname for instruction in dis.get_instructions(code)
    )
