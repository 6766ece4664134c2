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
from typing import Any, NamedTuple

now_ns = time.perf_counter_ns
get_ident = threading.get_ident

# A method that is called so often in a step, as by each layer, and takes so little, is
# timed in drawn steps only: watching it would cost as much as it does.
FREQUENT_CALLS = 16
FREQUENT_NS = 10_000
# Steps of so many calls between two looks for frequent methods that brought none.
LOOK_EVERY = 64
# Calls that are kept until the first step takes them; no step may ever.
CALLS_BEFORE_STEPS = 10_000
# Attribute of a wrapper: what the instance itself had in its place; None for nothing.
SHADOWED = "_kvtax_shadowed"
# No argument.
NONE: Any = object()
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


class WrapperCost(NamedTuple):
    """Time that a wrapper adds, in ns, measured in this process with an empty method.

    `inside` lies between the clock's readings of a timed call, `timed` is all that a
    timed call takes longer, and `counted` all that a counted one does.
    """

    inside: int = 0
    timed: int = 0
    counted: int = 0

    def of(self, calls: Calls, began_ns: int, ended_ns: int) -> int:
        """Return what the wrappers of these calls took between two moments."""
        return sum(
            self.counted * count if end_ns < 0 else self.timed * count
            for _, count, start_ns, end_ns in calls
            if end_ns < 0 or (start_ns >= began_ns and end_ns <= ended_ns)
        )


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


class _Span(NamedTuple):
    """A call: when it began, its time without the wrappers', and calls in it."""

    began_ns: int
    ns: int
    wrapped: int


def _sums(calls: Calls) -> dict[int, tuple[int, int, int]]:
    """Return by method how many calls, their time, and that without their own calls.

    Times are in ns, without those of the wrappers; of methods that were only counted
    they are -1.
    """
    sums: dict[int, tuple[int, int, int]] = {}
    cost = wrapper_cost()
    # Calls that no other call is known to have made.
    outer: list[_Span] = []
    # All timed calls: method, span, end.
    spans: list[tuple[int, _Span, int]] = []
    for i, count, began_ns, ended_ns in calls:
        ns = self_ns = -1
        if ended_ns >= 0:
            wrapped = inner_ns = 0
            while outer and outer[-1].began_ns >= began_ns:
                inner = outer.pop()
                inner_ns += inner.ns
                wrapped += inner.wrapped + 1
            own_ns = ended_ns - began_ns - cost.inside - cost.timed * wrapped
            ns = max(own_ns, inner_ns)
            self_ns = ns - inner_ns
            span = _Span(began_ns, ns, wrapped)
            outer.append(span)
            spans.append((i, span, ended_ns))
        if i in sums:
            before = sums[i]
            count += before[0]
            known = ns >= 0 and before[1] >= 0
            ns = before[1] + ns if known else -1
            self_ns = before[2] + self_ns if known else -1
        sums[i] = count, ns, self_ns
    if len(spans) > len(sums):
        _take_repeated(sums, spans)
    return sums


def _take_repeated(
    sums: dict[int, tuple[int, int, int]], spans: list[tuple[int, _Span, int]]
) -> None:
    """Take out calls within a call of the same method, whose time has theirs."""
    outermost: dict[int, int] = {}
    for i, span, ended_ns in reversed(spans):
        if ended_ns > outermost.get(i, ended_ns):
            count, ns, self_ns = sums[i]
            if ns >= 0:
                sums[i] = count, ns - span.ns, self_ns
        else:
            outermost[i] = span.began_ns


class Wrapped(NamedTuple):
    """A method that is timed, and the wrappers that may take its place."""

    connector: Any
    name: str
    timed: MethodType
    counted: MethodType


class ConnectorTimer:
    """Times of the connector's methods on one side, the scheduler's or the worker's.

    Only calls in `thread` count; those in others may overlap, and pass by. In steps
    that are not recorded the wrappers are taken off.
    """

    __slots__ = (
        "__weakref__",
        "_counts",
        "_looks_in",
        "_owner_thread",
        "_seen",
        "_wrapped",
        "calls",
        "connectors",
        "constant",
        "drawn",
        "frequent",
        "methods",
        "not_timed",
        "on",
        "thread",
    )

    def __init__(self) -> None:
        # Classes of the connector and of those in it.
        self.connectors: list[str] = []
        self.methods: list[str] = []
        # Methods that only return a constant.
        self.constant: list[str] = []
        self.not_timed: dict[str, str] = {}
        # The thread whose calls count, 0 while the wrappers are off.
        self.thread = self._owner_thread = get_ident()
        self.on = self.drawn = True
        # Timed calls since the last take(), and how many were counted by method.
        self.calls: Any = deque(maxlen=CALLS_BEFORE_STEPS)
        self._counts: list[int] = []
        self._wrapped: list[Wrapped] = []
        self.frequent: set[int] = set()
        self._looks_in = 0
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
        new = {id(child): child for child in _children(connector)}
        for known in self._seen & new.keys():
            del new[known]
        self._seen |= new.keys()
        for number, child in enumerate(new.values()):
            self.wrap(child, f"{prefix}{type(child).__name__}[{number}].")

    def stop(self) -> None:
        """Count and time no call from here on."""
        self.turn_off()
        self._owner_thread = 0

    def work_in(self, thread: int) -> None:
        """Count the calls in `thread` from here on."""
        self._owner_thread = thread
        if self.on:
            self.thread = thread

    def turn_on(self) -> None:
        """Put the wrappers on, for a step that is recorded."""
        self.on, self.thread = True, self._owner_thread
        if self.thread:
            self._put_on(range(len(self._wrapped)), taken_off=True)

    def turn_off(self) -> None:
        """Take the wrappers off: no call is timed or counted until turn_on()."""
        self.on, self.thread, self.calls = False, 0, []
        for connector, name, timed, counted in self._wrapped:
            held = vars(connector).get(name)
            if held is timed or held is counted:
                own = getattr(timed.__func__, SHADOWED)
                if own is None:
                    object.__delattr__(connector, name)
                else:
                    object.__setattr__(connector, name, own)

    def header(self) -> dict[str, Any]:
        """Return the fields of a file's header about the methods."""
        cost = wrapper_cost()._asdict()
        return {
            "connectors": self.connectors,
            "methods": self.methods,
            "constant": self.constant,
            "not_timed": self.not_timed,
            "wrapper_us": {part: ns / 1e3 for part, ns in cost.items()},
        }

    def take(self) -> Calls:
        """Return the calls since the last time."""
        calls: list[tuple[int, int, int, int]]
        calls, self.calls = self.calls, []
        if self.frequent and not self.drawn:
            for i in self.frequent:
                if count := self._counts[i]:
                    calls.append((i, count, 0, -1))
                    self._counts[i] = 0
        if len(calls) > FREQUENT_CALLS:
            self._looks_in -= 1
            if self._looks_in < 0:
                self._find_frequent(calls)
        return calls

    def draw(self, drawn: bool) -> None:
        """Begin a step, in which methods that are called often are timed if `drawn`."""
        if self.drawn is not drawn:
            self.drawn = drawn
            if self.frequent:
                self._put_on(self.frequent)

    def _find_frequent(self, calls: Calls) -> None:
        frequent = {
            i
            for i, (count, ns, _) in _sums(calls).items()
            if count > FREQUENT_CALLS and 0 <= ns < count * FREQUENT_NS
        }
        if frequent <= self.frequent:
            self._looks_in = LOOK_EVERY
        self.frequent |= frequent
        self._put_on(self.frequent)

    def _put_on(self, methods: Iterable[int], taken_off: bool = False) -> None:
        """Put on the wrappers of methods; another that has their place stays there."""
        for i in methods:
            connector, name, timed, counted = self._wrapped[i]
            held = vars(connector).get(name)
            own = getattr(timed.__func__, SHADOWED) if taken_off else timed
            if held is timed or held is counted or held is own:
                wrapper = counted if i in self.frequent and not self.drawn else timed
                object.__setattr__(connector, name, wrapper)

    def _wrap_method(self, connector: Any, name: str, prefix: str) -> None:
        attribute = inspect.getattr_static(connector, name, None)
        if not _is_own_method(attribute, name):
            return
        if _is_constant(attribute):
            self.constant.append(prefix + name)
            return
        is_own = name in getattr(connector, "__dict__", ())
        reason = _why_not_timed(attribute, is_own)
        if reason is None:
            try:
                wrappers = self._wrappers_of(connector, name, attribute, is_own)
            except Exception as error:
                reason = f"it cannot be wrapped: {error}"
        if reason is None:
            timed, counted = (MethodType(made, connector) for made in wrappers)
            if not shadow(connector, timed, counted):
                reason = "the connector's attributes cannot be set"
        if reason is not None:
            self.not_timed[prefix + name] = reason
            return
        self.methods.append(prefix + name)
        self._wrapped.append(Wrapped(connector, name, timed, counted))
        self._counts.append(0)

    def _wrappers_of(
        self, connector: Any, name: str, attribute: Any, is_own: bool
    ) -> tuple[FunctionType, FunctionType]:
        """Return the wrapper that times a method, and that which counts its calls."""
        i, counts = len(self.methods), self._counts
        # The class is asked at each call: a plugin may patch it later.
        owner: Any = type(connector)
        if is_own:
            owner = _In(name, lambda self_: attribute)
        elif _depends_on_instance(attribute):
            owner = _In(name, lambda self_: _of_instance(self_, name))

        names = {"kvtax_owner": owner, "kvtax_timer": self, "kvtax_counts": counts}
        timed, counted = _compiled(name, i, _parameters(attribute, owner), names)
        if inspect.isgeneratorfunction(getattr(attribute, "__func__", attribute)):
            timed, counted = _lazily(timed), _lazily(counted)
        signature = None
        if owner is not type(connector):
            signature = _signature(owner, connector, name)
        for wrapper in (timed, counted):
            _dress(wrapper, name, attribute)
            if signature is not None:
                wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return timed, counted

    def checked(self, i: int, result: Any) -> Any:
        """Return a method's result of a type that was not met before."""
        # Compiled ones are of types of their own.
        kind = type(result).__name__
        if kind == "generator":
            return _timed_generator(result, self, i)
        if kind in ("coroutine", "async_generator"):
            self.not_timed[self.methods[i]] = ASYNC
        else:
            _not_generators.add(type(result))
        return result


# A wrapper has the parameters of its method, and passes them on as they came: it is as
# short as can be. It looks the method up at each call, as a plugin may patch the class.
WRAPPERS = """
def {name}(kvtax_self, {parameters}):
    if kvtax_ident() != kvtax_timer.thread:
        return kvtax_owner.{name}(kvtax_self, {arguments})
    kvtax_began_ns = kvtax_now_ns()
    try:
        kvtax_result = kvtax_owner.{name}(kvtax_self, {arguments})
    finally:
        kvtax_timer.calls.append(({i}, 1, kvtax_began_ns, kvtax_now_ns()))
    if kvtax_result is None or type(kvtax_result) in kvtax_plain:
        return kvtax_result
    return kvtax_timer.checked({i}, kvtax_result)

kvtax_timed = {name}

def {name}(kvtax_self, {parameters}):
    kvtax_counts[{i}] += 1
    return kvtax_owner.{name}(kvtax_self, {arguments})
"""
ANY = "/, *kvtax_args, **kvtax_kwargs"


def _compiled(
    name: str, i: int, parameters: str, names: dict[str, Any]
) -> tuple[FunctionType, FunctionType]:
    """Return the wrappers of method `i`, that which times it and that which counts."""
    arguments = parameters.removeprefix("/, ")
    text = WRAPPERS.format(name=name, i=i, parameters=parameters, arguments=arguments)
    space = names | {
        "kvtax_ident": get_ident,
        "kvtax_now_ns": now_ns,
        "kvtax_plain": _not_generators,
    }
    exec(compile(text, __file__, "exec"), space)
    return space["kvtax_timed"], space[name]


def _parameters(attribute: Any, owner: Any) -> str:
    """Return the parameters of a method without defaults; any, of other methods."""
    if not isinstance(attribute, FunctionType) or isinstance(owner, _In):
        return ANY
    signature = inspect.signature(attribute, follow_wrapped=False)
    parameters = list(signature.parameters.values())[1:]
    if any(
        p.kind != p.POSITIONAL_OR_KEYWORD or p.default != p.empty for p in parameters
    ):
        return ANY
    return ", ".join(parameter.name for parameter in parameters)


def _lazily(call: FunctionType) -> FunctionType:
    """Return a generator function of what `call` returns."""

    def lazy(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
        return (yield from call(self_, *args, **kwargs))

    assert isinstance(lazy, FunctionType)
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


def _of_instance(connector: Any, name: str) -> Any:
    """Return the method that the instance has from its class."""
    kind = type(connector)
    attribute = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
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
    for wrapper in (method, *others):
        setattr(wrapper.__func__, SHADOWED, own)
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
        values = {name: _own(connector, name, held) for name, held in state.items()}
        return {
            name: value
            for name, value in values.items()
            if value is state[name] or value
        }

    return (*reduced[:2], without(reduced[2]), *reduced[3:])


def _is_own_method(attribute: Any, name: str) -> bool:
    """Return whether a public attribute is a method of the connector's own.

    Those inherited from vLLM's base class are not; attention calls some of them twice a
    layer.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if isinstance(attribute, type):
        return False
    if not callable(attribute) and not isinstance(attribute, METHODS_NOT_CALLED):
        return False
    return attribute is not inspect.getattr_static(KVConnectorBase_V1, name, None)


def _is_constant(attribute: Any) -> bool:
    """Return whether a method only returns a constant, which takes no time."""
    function = getattr(attribute, "__func__", attribute)
    return isinstance(function, FunctionType) and _CONSTANT.issuperset(
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
        for child in several:
            if isinstance(child, KVConnectorBase_V1):
                yield child


# Types of results that were met: their names need not be read again.
_not_generators: set[type] = set()
_timers: dict[str, ConnectorTimer] = {}
_all_timers: weakref.WeakSet[ConnectorTimer] = weakref.WeakSet()


def _stop_all() -> None:
    """Stop all timers: in a fork no step will ever take their calls."""
    for timer in _all_timers:
        timer.stop()


os.register_at_fork(after_in_child=_stop_all)


_wrapper_cost: WrapperCost | None = None
# Calls by which the wrappers' cost is measured, and how often.
MEASURED_CALLS, MEASURED_TIMES = 200, 9


def wrapper_cost() -> WrapperCost:
    """Return what the wrappers of this process cost; measured once."""
    global _wrapper_cost
    if _wrapper_cost is None:
        _wrapper_cost = WrapperCost()
        _wrapper_cost = _measured_cost()
    return _wrapper_cost


class _Empty:
    """A connector whose method does nothing."""

    def method(self, argument: Any) -> Any:
        return argument


def _measured_cost() -> WrapperCost:
    """Measure the wrappers' cost with an empty method; the least of several times."""
    empty, timer = _Empty(), ConnectorTimer()
    timer._counts.append(0)
    made = timer._wrappers_of(empty, "method", _Empty.method, False)
    timed, counted = (MethodType(wrapper, empty) for wrapper in made)
    calls: dict[str, Callable[[Any], Any]]
    calls = {"bare": empty.method, "timed": timed, "counted": counted}
    ns: dict[str, list[int]] = {name: [] for name in (*calls, "inside")}
    for _ in range(MEASURED_TIMES):
        for name, call in calls.items():
            began_ns = now_ns()
            for _ in range(MEASURED_CALLS):
                call(None)
            ns[name].append(now_ns() - began_ns)
        spans = sorted(end - began for _, _, began, end in timer.calls)
        timer.calls = []
        ns["inside"].append(spans[len(spans) // 2] * MEASURED_CALLS)
    least = {name: min(values) // MEASURED_CALLS for name, values in ns.items()}
    return WrapperCost(
        least["inside"],
        max(least["timed"] - least["bare"], 0),
        max(least["counted"] - least["bare"], 0),
    )


def time_connector(connector: Any) -> None:
    """Time a connector that was made for its role, `SCHEDULER` or `WORKER`."""
    wrapper_cost()
    timer = _timers[connector.role.name] = ConnectorTimer()
    timer.wrap(connector)


def timer_of(role: str) -> ConnectorTimer:
    """Return the timer of the connector that was made last for a role."""
    return _timers.setdefault(role, ConnectorTimer())
