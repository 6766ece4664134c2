# SPDX-License-Identifier: Apache-2.0
"""Record what each engine step of vLLM costs, and what the KV connector's part is.

With KVTAX_STEP_RECORDS_DIR set to a directory, install() makes vLLM record its steps,
otherwise it does nothing. vLLM's source stays as it is: three seams are wrapped that
all releases share, the engine core's step, the worker's execute_model, and the factory
that makes connectors; and what workers of Ray have in the place of execute_model.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import FunctionType, MethodType, ModuleType
from typing import Any

__version__ = "0.1.0"

# vLLM's handlers print what its own loggers report, from INFO on.
logger = logging.getLogger("vllm.kvtax_probe")


def install() -> None:
    """Record this process's steps from now on, if KVTAX_STEP_RECORDS_DIR is set.

    Modules of vLLM that are not imported yet are wrapped when they are. A second call
    does nothing, and a failure is one line in vLLM's log.
    """
    if not os.environ.get("KVTAX_STEP_RECORDS_DIR"):
        return
    waiting = {}
    for name, wrap in _SEAMS.items():
        if name in sys.modules:
            _wrap_once(sys.modules[name], wrap)
        else:
            waiting[name] = wrap
    if waiting and not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport(waiting))


# The recorder of an engine or a worker that has made no step.
_NOT_YET = object()


# Methods of an engine whose first call attaches a recorder. Requests are added before
# the first step.
ATTACHING = ("add_request", "step", "step_with_batch_queue")


def _wrap_engine_core(module: ModuleType) -> None:
    module.EngineCore._kvtax_recorder = _NOT_YET
    for name in ATTACHING:
        setattr(module.EngineCore, name, _attached(getattr(module.EngineCore, name)))


def _attached(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which attaches a recorder to its engine at the first call."""

    @functools.wraps(method)
    def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._kvtax_recorder is _NOT_YET:
            record_engine(self)
        return method(self, *args, **kwargs)

    return attached


# The code of all wrappers that attach.
_ATTACHED = _attached(lambda self: None).__code__


def record_engine(engine_core: Any) -> None:
    """Record the steps of an engine core from here on."""
    engine_core._kvtax_recorder = None
    engine_core._kvtax_recorder = _guarded(_engine_recorder, engine_core)
    _guarded(_let_go, engine_core)


def _let_go(engine_core: Any) -> None:
    """Have an engine that has its recorder call its own methods from here on."""
    for name in ATTACHING:
        method = getattr(type(engine_core), name, None)
        if isinstance(method, FunctionType) and method.__code__ is _ATTACHED:
            own = MethodType(method.__wrapped__, engine_core)  # type: ignore[attr-defined]
            object.__setattr__(engine_core, name, own)
            # The engine has taken one of them for its loop.
            if getattr(engine_core, "step_fn", None) == MethodType(method, engine_core):
                engine_core.step_fn = own


def _engine_recorder(engine_core: Any) -> Any:
    from .engine import EngineRecorder

    return EngineRecorder(engine_core)


def _make_room(module: ModuleType) -> None:
    """Have Python keep room for our two attributes in each SchedulerOutput.

    It plans all instances by the first ones. One that gets more attributes later has
    them in a dict of its own, where each is slower to find for everybody.
    """
    output = object.__new__(module.SchedulerOutput)
    output.step_id = output.records_life = None


def _wrap_worker(module: ModuleType) -> None:
    worker = module.WorkerWrapperBase
    worker._kvtax_recorder = _NOT_YET
    worker.execute_model = _recorded(worker.execute_model)


def _wrap_ray_worker(module: ModuleType) -> None:
    # Ray's compiled graph passes by execute_model. The SchedulerOutput is the first of
    # a tuple. None without Ray; later releases do without this class.
    worker = getattr(module, "RayWorkerWrapper", None)
    if worker is not None:
        worker.execute_model_ray = _recorded(worker.execute_model_ray)


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which executes a step of its worker's model, with a recorder."""

    @functools.wraps(method)
    def recorded(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._kvtax_recorder
        if recorder is _NOT_YET:
            recorder = self._kvtax_recorder = _guarded(_worker_recorder, self)
        if recorder is None or (recorder.is_idle and not hasattr(step, "records_life")):
            # A call without * takes half as long.
            if args or kwargs:
                return method(self, step, *args, **kwargs)
            return method(self, step)
        try:
            recorder.begin_step(step[0] if isinstance(step, tuple) else step)
        except Exception:
            logger.exception("kvtax: no step records of this worker from here on")
            self._kvtax_recorder = None
            recorder.give_up()
        try:
            if args or kwargs:
                return method(self, step, *args, **kwargs)
            return method(self, step)
        finally:
            recorder.ended_ns = perf_counter_ns()

    return recorded


def _worker_recorder(worker: Any) -> Any:
    from .worker import WorkerRecorder

    return WorkerRecorder(worker)


def _wrap_factory(module: ModuleType) -> None:
    create = module.KVConnectorFactory.create_connector.__func__
    # Connectors being made: one may have the factory make those in it.
    making: list[None] = []

    @functools.wraps(create)
    def create_connector(cls: type, *args: Any, **kwargs: Any) -> Any:
        _guarded(_note_threads, None)
        making.append(None)
        try:
            connector = create(cls, *args, **kwargs)
        finally:
            making.pop()
        if not making:
            _guarded(_time_connector, connector)
        return connector

    module.KVConnectorFactory.create_connector = classmethod(create_connector)


def _note_threads(_: None) -> None:
    from .threads import threads_of_executor

    threads_of_executor()


def _time_connector(connector: Any) -> None:
    from .connector import time_connector

    time_connector(connector)


_SEAMS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.core.sched.output": _make_room,
    "vllm.v1.engine.core": _wrap_engine_core,
    "vllm.v1.worker.worker_base": _wrap_worker,
    "vllm.v1.executor.ray_utils": _wrap_ray_worker,
    "vllm.distributed.kv_transfer.kv_connector.factory": _wrap_factory,
}


def _wrap_once(module: ModuleType, wrap: Callable[[ModuleType], None]) -> None:
    """Wrap a module's seam, unless another copy of this package has."""
    if not getattr(module, "_kvtax_recorded", False):
        module._kvtax_recorded = True  # type: ignore[attr-defined]
        _guarded(wrap, module)


def _guarded(call: Callable[[Any], Any], argument: Any) -> Any:
    """Return what `call` returns; None if it fails: vLLM must serve all the same."""
    try:
        return call(argument)
    except Exception:
        name = call.__name__.strip("_")
        logger.exception("kvtax: no step records from here on, %s failed", name)
        return None


class _OnImport(importlib.abc.MetaPathFinder):
    """Finder that wraps a module's seam once the module is imported."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]):
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wrap = self._waiting.pop(fullname, None)
        if wrap is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader, wrap)
        return spec


class _Wrapping(importlib.abc.Loader):
    """Loader that wraps a seam of the module that another loader has executed."""

    def __init__(self, loader: Any, wrap: Callable[[ModuleType], None]):
        self._loader, self._wrap = loader, wrap

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if it had been imported without us.
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        _wrap_once(module, self._wrap)
