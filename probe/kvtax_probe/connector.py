# SPDX-License-Identifier: Apache-2.0
"""Timer of a connector's methods, whatever methods the connector or release has.

A wrapper is an attribute of the instance and shadows the method. The class stays as it
is, and so does all that isinstance() says. A wrapper is a bound method of the connector
as the method is, and is pickled as that. Copies of a connector have none.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

now_ns = time.perf_counter_ns
get_ident = threading.get_ident

# Methods that vLLM calls once a step: timed even where they do nothing, since their
# times have fields of their own.
STEP_METHODS = (
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
)
# A method that is called so often in a step, as by each layer, and takes so little, is
# timed in drawn steps only: watching it would cost as much as it does.
FREQUENT_CALLS = 16
FREQUENT_NS = 10_000
# Calls that are kept until the first step takes them; no step may ever.
CALLS_BEFORE_STEPS = 10_000
# Attribute of a wrapper: what the instance itself had in its place; None for nothing.
SHADOWED = "_kvtax_shadowed"
ASYNC = "an async method: its work runs in an event loop"
# Kinds of methods that are no callables, or that need no instance.
METHODS_NOT_CALLED = (
    staticmethod,
    classmethod,
    functools.partialmethod,
    functools.singledispatchmethod,
)
# The code of a method that does no more than return a constant.
_CONSTANT = {"RESUME", "LOAD_CONST", "LOAD_SMALL_INT", "RETURN_VALUE", "RETURN_CONST"}


# Calls in the order of their ends: each has the method's index, how many calls it is,
# and when they began and ended in ns. The end of calls that were only counted is -1. No
# call is what goes on with the work of an earlier one.
Calls = Sequence[tuple[int, int, int, int]]


def fill(record: Any, calls: Calls, methods: list[str], fields: dict[str, str]) -> None:
    """Set a record's fields by method; `fields` names the fields of some methods.

    Left out is what a reader knows: one call, a time equal to the self time, and a
    self time equal to the field of the method.
    """
    counts: dict[str, int] = {}
    us: dict[str, float] = {}
    self_us: dict[str, float] = {}
    for i, (count, ns, self_ns) in _sums(calls).items():
        name = methods[i]
        if count != 1:
            counts[name] = count
        if ns < 0:
            continue
        field = fields.get(name)
        if field is not None:
            setattr(record, field, ns / 1e3)
            if count == 1 and ns == self_ns:
                continue
        self_us[name] = self_ns / 1e3
        if ns != self_ns:
            us[name] = ns / 1e3
    record.connector_calls = counts or None
    record.connector_us = us or None
    record.connector_self_us = self_us or None


def _sums(calls: Calls) -> dict[int, tuple[int, int, int]]:
    """Return by method how many calls, their time, and that without their own calls.

    Times are in ns; of methods that were only counted they are -1.
    """
    sums: dict[int, tuple[int, int, int]] = {}
    may_repeat = False
    # Calls that no other call is known to have made: when they began, how long.
    outer: list[tuple[int, int]] = []
    for i, count, began_ns, ended_ns in calls:
        ns = self_ns = -1
        if ended_ns >= 0:
            ns = self_ns = ended_ns - began_ns
            while outer and outer[-1][0] >= began_ns:
                self_ns -= outer.pop()[1]
            outer.append((began_ns, ns))
        if i in sums:
            before = sums[i]
            may_repeat |= self_ns < ns
            count += before[0]
            known = ns >= 0 and before[1] >= 0
            ns = before[1] + ns if known else -1
            self_ns = before[2] + self_ns if known else -1
        sums[i] = count, ns, self_ns
    if may_repeat:
        # A call within a call of the same method: its time is in that one's.
        outermost: dict[int, int] = {}
        for i, _, began_ns, ended_ns in reversed(calls):
            if ended_ns > outermost.get(i, ended_ns):
                count, ns, self_ns = sums[i]
                sums[i] = count, ns - (ended_ns - began_ns), self_ns
            elif ended_ns >= 0:
                outermost[i] = began_ns
    return sums


class ConnectorTimer:
    """Times of the connector's methods on one side, the scheduler's or the worker's.

    Only calls in `thread` count; those in others may overlap, and pass by.
    """

    __slots__ = (
        "__weakref__",
        "_counts",
        "_seen",
        "_wrappers",
        "calls",
        "connectors",
        "drawn",
        "frequent",
        "methods",
        "not_timed",
        "thread",
    )

    def __init__(self) -> None:
        # Classes of the connector and of those in it.
        self.connectors: list[str] = []
        self.methods: list[str] = []
        self.not_timed: dict[str, str] = {}
        self.thread = get_ident()
        self.drawn = True
        # Timed calls since the last take(), and how many were counted by method.
        self.calls: Any = deque(maxlen=CALLS_BEFORE_STEPS)
        self._counts: list[int] = []
        # By index: (connector, name, wrapper that times, wrapper that counts).
        self._wrappers: list[tuple[Any, str, MethodType, MethodType]] = []
        self.frequent: set[int] = set()
        self._seen: set[int] = set()
        _all_timers.add(self)

    def wrap(self, connector: Any, prefix: str = "") -> None:
        """Time the connector's public methods, and those of the connectors in it.

        A connector that is met again, as one that knows the one that holds it, has its
        name from where it was met first.
        """
        self._seen.add(id(connector))
        self.connectors.append(type(connector).__name__)
        for name in dir(type(connector)):
            if not name.startswith("_"):
                self._wrap_method(connector, name, prefix)
        with suppress(TypeError):  # a metaclass may make its classes unhashable
            copyreg.dispatch_table.setdefault(type(connector), _reduced)
        new = {id(one): one for one in _children(connector)}
        for known in self._seen & new.keys():
            del new[known]
        self._seen |= new.keys()
        for number, child in enumerate(new.values()):
            self.wrap(child, f"{prefix}{type(child).__name__}[{number}].")

    def stop(self) -> None:
        """Count and time no call from here on."""
        self.thread, self.calls = 0, []
        self.frequent.clear()

    def take(self) -> Calls:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        if self.frequent and not self.drawn:
            for i in self.frequent:
                if count := self._counts[i]:
                    calls.append((i, count, 0, -1))
                    self._counts[i] = 0
        if len(calls) > FREQUENT_CALLS:
            self._find_frequent(calls)
        return calls

    def draw(self, drawn: bool) -> None:
        """Begin a step, in which methods that are called often are timed if `drawn`."""
        if self.drawn is not drawn:
            self.drawn = drawn
            if self.frequent:
                self._swap_frequent()

    def _find_frequent(self, calls: Calls) -> None:
        for i, (count, ns, _) in _sums(calls).items():
            if count > FREQUENT_CALLS and 0 <= ns < count * FREQUENT_NS:
                self.frequent.add(i)
        self._swap_frequent()

    def _swap_frequent(self) -> None:
        for i in self.frequent:
            connector, name, timed, counted = self._wrappers[i]
            # The connector may have put another in its place meanwhile.
            held = vars(connector).get(name)
            if held is timed or held is counted:
                object.__setattr__(connector, name, timed if self.drawn else counted)

    def _wrap_method(self, connector: Any, name: str, prefix: str) -> None:
        attribute = inspect.getattr_static(connector, name, None)
        if not _may_take_time(attribute, name):
            return
        is_own = name in getattr(connector, "__dict__", ())
        reason = _why_not_timed(attribute, is_own)
        if reason is None:
            try:
                wrappers = self._wrapped(connector, name, attribute, is_own)
            except Exception as error:
                reason = f"it cannot be wrapped: {error}"
        if reason is None:
            timed, counted = (MethodType(one, connector) for one in wrappers)
            if not shadow(connector, timed, counted):
                reason = "the connector's attributes cannot be set"
        if reason is not None:
            self.not_timed[prefix + name] = reason
            return
        self.methods.append(prefix + name)
        self._wrappers.append((connector, name, timed, counted))
        self._counts.append(0)

    def _wrapped(
        self, connector: Any, name: str, attribute: Any, is_own: bool
    ) -> tuple[FunctionType, FunctionType]:
        """Return the wrappers of method `i`, one that times and one that counts."""
        i, counts = len(self.methods), self._counts
        # The class is asked at each call: a plugin may patch it later.
        owner: Any = type(connector)
        if is_own:
            owner = _In(name, lambda self_: attribute)
        elif _depends_on_instance(attribute):
            owner = _In(name, lambda self_: _found(self_, name))

        def timed(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != self.thread:
                return getattr(owner, name)(self_, *args, **kwargs)
            began_ns = now_ns()
            try:
                if len(args) == 1 and not kwargs:
                    # Most of vLLM's calls: written out they take a third less.
                    result = getattr(owner, name)(self_, args[0])
                else:
                    result = getattr(owner, name)(self_, *args, **kwargs)
            finally:
                self.calls.append((i, 1, began_ns, now_ns()))
            if result is None or type(result) in _not_generators:
                return result
            # Compiled ones are of types of their own.
            kind = type(result).__name__
            if kind == "generator":
                return _timed_generator(result, self, i)
            if kind in ("coroutine", "async_generator"):
                self.not_timed[self.methods[i]] = ASYNC
            else:
                _not_generators.add(type(result))
            return result

        def counted(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == self.thread:
                counts[i] += 1
            if kwargs:
                return getattr(owner, name)(self_, *args, **kwargs)
            return getattr(owner, name)(self_, *args)

        if inspect.isgeneratorfunction(getattr(attribute, "__func__", attribute)):
            timed, counted = _lazily(timed), _lazily(counted)
        signature = None
        if owner is not type(connector):
            signature = _signature(owner, connector, name)
        for wrapper in (timed, counted):
            _dress(wrapper, name, attribute)
            if signature is not None:
                wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return timed, counted  # type: ignore[return-value]


def _lazily(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a generator function of what `call` returns."""

    def lazy(self_: Any, *args: Any, **kwargs: Any) -> Any:
        return (yield from call(self_, *args, **kwargs))

    return lazy


def _timed_generator(generator: Any, timer: ConnectorTimer, method: int) -> Any:
    """Return a generator that runs when it is asked for a value, as the one within."""

    def run(call: Any, *args: Any) -> Any:
        if get_ident() != timer.thread:
            return call(*args)
        began_ns = now_ns()
        try:
            return call(*args)
        finally:
            timer.calls.append((method, 0, began_ns, now_ns()))

    def timed() -> Any:
        step, argument = generator.send, None
        while True:
            try:
                value = run(step, argument)
            except StopIteration as end:
                return end.value
            try:
                step, argument = generator.send, (yield value)
            except GeneratorExit:
                run(generator.close)
                raise
            except BaseException as error:
                step, argument = generator.throw, error

    made = timed()
    made.__name__, made.__qualname__ = generator.__name__, generator.__qualname__
    return made


class _In:
    """The place of a method that is found in no class, but by its instance."""

    def __init__(self, name: str, find: Callable[[Any], Any]):
        self.find = find
        setattr(self, name, lambda self_, *args, **kwargs: find(self_)(*args, **kwargs))


def _depends_on_instance(attribute: Any) -> bool:
    """Return whether a class and its instance may give different methods.

    Those of C give themselves, as functions do.
    """
    own_get = getattr(type(attribute), "__get__", None)
    return isinstance(attribute, METHODS_NOT_CALLED) or isinstance(
        own_get, FunctionType
    )


def _found(connector: Any, name: str) -> Any:
    """Return the method that the instance has from its class."""
    kind = type(connector)
    attribute = next(vars(one)[name] for one in kind.__mro__ if name in vars(one))
    return attribute.__get__(connector, kind)


def _signature(place: _In, connector: Any, name: str) -> inspect.Signature | None:
    with suppress(TypeError, ValueError):
        signature = inspect.signature(place.find(connector))
        instance = inspect.Parameter("self_", inspect.Parameter.POSITIONAL_ONLY)
        return signature.replace(parameters=[instance, *signature.parameters.values()])
    return None


def _dress(wrapper: Any, name: str, attribute: Any) -> None:
    """Give a wrapper the name and the attributes of what it wraps.

    The name is the one by which pickle finds the method.
    """
    functools.update_wrapper(wrapper, attribute)
    for extra in set(dir(attribute)) - set(dir(wrapper)):
        if not extra.startswith("__"):
            setattr(wrapper, extra, getattr(attribute, extra))
    wrapper.__name__ = name


def shadow(connector: Any, method: MethodType, *others: MethodType) -> bool:
    """Have `method` called in the place of the connector's method of its name.

    `others` may take that place later. Returns whether that is possible.
    """
    name = method.__name__
    own = _own(connector, name, getattr(connector, "__dict__", {}).get(name))
    for one in (method, *others):
        setattr(one.__func__, SHADOWED, own)
    try:
        # A connector may guard its attributes by a __setattr__ of its own.
        object.__setattr__(connector, name, method)
    except (AttributeError, TypeError):
        return False
    return True


def _own(connector: Any, name: str, value: Any) -> Any:
    """Return an attribute of the instance without wrappers; None if it was one."""
    is_method = isinstance(value, MethodType) and value.__self__ is connector
    if is_method and getattr(value, "__name__", None) == name:
        return getattr(value.__func__, SHADOWED, value)
    return value


def _reduced(connector: Any) -> Any:
    """Reduce a connector for a copy or a pickle, without wrappers.

    A wrapper would call the method of the connector that was copied.
    """
    reduced = connector.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced

    def without(state: Any) -> Any:
        if type(state) is tuple:
            return tuple(map(without, state))
        if type(state) is not dict:
            return state
        own = ((name, _own(connector, name, one), one) for name, one in state.items())
        return {name: one for name, one, before in own if one is before or one}

    return (*reduced[:2], without(reduced[2]), *reduced[3:])


def _may_take_time(attribute: Any, name: str) -> bool:
    """Return whether a public attribute is a method that can take time.

    Excluded are methods that only return a constant, and those inherited from vLLM's
    base class: attention calls some of them twice a layer.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if isinstance(attribute, type):
        return False
    if not callable(attribute) and not isinstance(attribute, METHODS_NOT_CALLED):
        return False
    if name in STEP_METHODS:
        return True
    if attribute is inspect.getattr_static(KVConnectorBase_V1, name, None):
        return False
    function = getattr(attribute, "__func__", attribute)
    return not isinstance(function, FunctionType) or not _CONSTANT.issuperset(
        instruction.opname for instruction in dis.get_instructions(function)
    )


def _why_not_timed(attribute: Any, is_own: bool) -> str | None:
    function = getattr(attribute, "__func__", attribute)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return ASYNC
    if not is_own and not hasattr(attribute, "__get__"):
        return "an object that is called, not a method"
    return None


def _children(connector: Any) -> Iterator[Any]:
    """Yield the connectors that a connector holds, as MultiConnector does."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for value in list(getattr(connector, "__dict__", {}).values()):
        several: Iterable[Any] = (value,)
        if isinstance(value, (list, tuple, dict)):
            several = value.values() if isinstance(value, dict) else value
        for one in several:
            if isinstance(one, KVConnectorBase_V1):
                yield one


# Types of results that were met: their names need not be read again.
_not_generators: set[type] = set()
_timers: dict[str, ConnectorTimer] = {}
_all_timers: weakref.WeakSet[ConnectorTimer] = weakref.WeakSet()


def _stop_all() -> None:
    """Stop all timers: in a fork no step will ever take their calls."""
    for timer in _all_timers:
        timer.stop()


os.register_at_fork(after_in_child=_stop_all)


def time_connector(connector: Any) -> None:
    """Time a connector that was made for its role, `SCHEDULER` or `WORKER`."""
    timer = _timers[connector.role.name] = ConnectorTimer()
    timer.wrap(connector)


def timer_of(role: str) -> ConnectorTimer:
    """Return the timer of the connector that was made last for a role."""
    return _timers.setdefault(role, ConnectorTimer())
