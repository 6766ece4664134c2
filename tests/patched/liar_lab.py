# SPDX-License-Identifier: Apache-2.0
"""An engine with a lying connector, which tells what each call of a lie took."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state

from connectors.liar import (
    SCHEDULER_METHODS,
    THREAD,
    WORKER_METHODS,
    Lie,
    LyingConnector,
    Step,
)
from lab.serving.null_engine import NullEngine

PROMPT_TOKENS, OUTPUT_TOKENS = 1_024, 12
# Methods that an engine calls in the run below: it preempts no request.
CALLED = [
    name
    for name in (*SCHEDULER_METHODS, *WORKER_METHODS)
    if name != "handle_preemptions"
]


class Liar:
    """A real engine, and both sides of its connector."""

    def __init__(self, model: Path, **lie) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
        self.engine = NullEngine(
            model,
            {
                "kv_connector": "LyingConnector",
                "kv_connector_module_path": "connectors.liar",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"method": "get_finished"} | lie,
            },
        )
        self._prompts = 0
        self.scheduler = self.engine.core.scheduler.connector
        self.worker = get_kv_transfer_group()
        assert isinstance(self.scheduler, LyingConnector)
        assert isinstance(self.worker, LyingConnector)

    def tell(self, **lie) -> None:
        """Both sides lie like this from now on, and no longer as before."""
        for side in (self.scheduler, self.worker):
            vars(side).pop(side._lie.method, None)
            side._lie = Lie(**lie)
            if side._lie.method != THREAD:
                honest = getattr(side, side._lie.method)
                setattr(side, side._lie.method, side._lying(honest))

    def run(self, requests: int) -> list[tuple[Step, float]]:
        """One request after the other, from an empty cache on.

        For each call of the lie: what the connector knew of the step, and us.
        """
        assert self.engine.core.scheduler.reset_prefix_cache()
        spent = []
        spend = LyingConnector._spend

        def timed(connector: LyingConnector) -> None:
            before_ns = time.thread_time_ns()
            spend(connector)
            us = (time.thread_time_ns() - before_ns) / 1e3
            spent.append((connector._step, us))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LyingConnector, "_spend", timed)
            for _ in range(requests):
                self._prompts += 1
                self.engine.add([self._prompts] * PROMPT_TOKENS, OUTPUT_TOKENS)
                self.engine.run_to_end()
        return spent

    def spent_us(self, method: str, *arguments) -> float:
        """Wall time of one call of a method of the worker's side."""
        before_ns = time.perf_counter_ns()
        getattr(self.worker, method)(*arguments)
        return (time.perf_counter_ns() - before_ns) / 1e3


class CalledMethods:
    """The names of the public methods that are called on lying connectors meanwhile."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> CalledMethods:
        for name in dir(LyingConnector):
            does = getattr(LyingConnector, name)
            if not name.startswith("_") and callable(does) and _takes_self(does):
                self._patch.setattr(LyingConnector, name, self._noting(name, does))
        return self

    def __exit__(self, *_) -> None:
        self._patch.undo()

    def _noting(self, name: str, does):
        @functools.wraps(does)
        def method(connector, *arguments, **options):
            self.names.add(name)
            return does(connector, *arguments, **options)

        return method


def _takes_self(does) -> bool:
    """False of class methods, which come bound already."""
    return not hasattr(does, "__self__")
