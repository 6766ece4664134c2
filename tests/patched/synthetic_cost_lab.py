# SPDX-License-Identifier: Apache-2.0
"""Engine with a synthetic cost: measures what each call of the method took."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state

from connectors.synthetic_cost import (
    THREAD,
    Cost,
    Step,
    SyntheticCostConnector,
)
from kvtax.engine.null_engine import NullEngine

PROMPT_TOKENS, OUTPUT_TOKENS = 1_024, 12


class CostEngine:
    """A real engine, and both sides of its connector."""

    def __init__(self, model: Path, **cost) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = None  # an earlier engine's
        self.engine = NullEngine(
            model,
            {
                "kv_connector": "SyntheticCostConnector",
                "kv_connector_module_path": "connectors.synthetic_cost",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "costs": [{"method": "get_finished"} | cost]
                },
            },
        )
        self._prompts = 0
        self.scheduler = self.engine.core.scheduler.connector
        self.worker = get_kv_transfer_group()
        assert isinstance(self.scheduler, SyntheticCostConnector)
        assert isinstance(self.worker, SyntheticCostConnector)

    def set_cost(self, **cost) -> None:
        """Replace the cost on both sides."""
        for side in (self.scheduler, self.worker):
            (before,) = side._costs
            vars(side).pop(before.method, None)
            side._costs = [new] = [Cost(**cost)]
            if new.method != THREAD:
                free = getattr(side, new.method)
                setattr(side, new.method, side._with_cost(free, new))

    def run(self, requests: int) -> list[tuple[Step, float]]:
        """Run one request after the other, from an empty cache.

        Return for each costly call the connector's step and the microseconds.
        """
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        assert self.engine.core.scheduler.reset_prefix_cache()
        spent = []
        spend = SyntheticCostConnector._spend

        def timed(connector: SyntheticCostConnector, cost: Cost) -> None:
            before_ns = time.thread_time_ns()
            spend(connector, cost)
            us = (time.thread_time_ns() - before_ns) / 1e3
            spent.append((connector._step, us))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SyntheticCostConnector, "_spend", timed)
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
    """The names of the public methods that are called on the connector meanwhile."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> CalledMethods:
        for name in dir(SyntheticCostConnector):
            does = getattr(SyntheticCostConnector, name)
            if not name.startswith("_") and callable(does) and _takes_self(does):
                self._patch.setattr(
                    SyntheticCostConnector, name, self._noting(name, does)
                )
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
