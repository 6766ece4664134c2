# SPDX-License-Identifier: Apache-2.0
"""Two versions of one connector that vLLM's scheduler takes for one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

# They hold times, which differ.
NOT_COMPARED = {"get_kv_connector_stats"}


class Twin:
    """Each call goes to both connectors; both must answer the same."""

    def __init__(self, before: Any, after: Any) -> None:
        self.both = before, after

    @property
    def __class__(self) -> type:
        """vLLM asks what the connector is an instance of."""
        return type(self.both[0])

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(one, name) for one in self.both]
        if not callable(methods[0]):
            return methods[0]

        def call(*arguments: Any, **options: Any) -> Any:
            answers = [method(*arguments, **options) for method in methods]
            if isinstance(answers[0], Iterator):
                answers = [list(answer) for answer in answers]
            if name not in NOT_COMPARED:
                first, second = map(plain, answers)
                assert first == second, f"{name}: {first} before, {second} after"
            return answers[0]

        return call


class TimedTwin(Twin):
    """Times `build_connector_meta` of both in each step, in an order drawn anew."""

    def __init__(self, before: Any, after: Any) -> None:
        super().__init__(before, after)
        # us, per step: before, after.
        self.times_us: list[list[float]] = []
        self._order = Random(0)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        times_us, metas = [0.0, 0.0], [None, None]
        for index in self._order.sample((0, 1), 2):
            build = self.both[index].build_connector_meta
            began_ns = time.perf_counter_ns()
            metas[index] = build(scheduler_output)
            times_us[index] = (time.perf_counter_ns() - began_ns) / 1e3
        self.times_us.append(times_us)
        return metas[0]


def plain(value: Any) -> Any:
    """A value that compares by content: of objects, their class's name and fields."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case np.ndarray():
            return value.tolist()
        case dict():
            return {plain(key): plain(one) for key, one in value.items()}
        case set() | frozenset():
            return sorted(map(plain, value))
        case list() | tuple():
            return [plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        fields = vars(value)
    return type(value).__name__, plain(fields)
