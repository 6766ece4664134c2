# SPDX-License-Identifier: Apache-2.0
"""A patched module of vLLM twice in one process, before and after its patches."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Iterator
from importlib.abc import SourceLoader
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from kvtax.patcher.blocks import parse, render

_numbers = count()


def before_and_after(
    name: str, edit: tuple[str, str] | None = None
) -> tuple[ModuleType, ModuleType]:
    """Load the module `name` without the blocks of its patches, and with them.

    `edit` is something wrong, for tests: a text of the second, and what replaces it.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, SourceLoader):
        raise RuntimeError(f"no module {name} with a source")
    path = Path(str(spec.origin))
    # That of the file, or what an overlay has in its place.
    source = spec.loader.get_source(name) or ""
    lines, blocks = parse(source.encode())
    if not blocks:
        raise RuntimeError(f"{path} is not patched")
    after = render(lines, blocks).decode()
    if edit:
        assert after.count(edit[0]) == 1, edit
        after = after.replace(*edit)
    return _module(name, render(lines, []).decode(), path), _module(name, after, path)


def _module(name: str, source: str, path: Path) -> ModuleType:
    """Make a new module, so that no variant runs code that another has warmed up."""
    module = ModuleType(f"{name}_{next(_numbers)}")
    # Dataclasses look their module up there.
    sys.modules[module.__name__] = module
    exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    return module


# They hold times, which differ.
NOT_COMPARED = {"get_kv_connector_stats"}


class Twin:
    """Two connectors that receive each call; their results must be equal."""

    def __init__(self, before: Any, after: Any) -> None:
        self.both = before, after

    @property  # type: ignore[misc]  # a class attribute to the checker
    def __class__(self) -> type:
        """Return the first connector's class: vLLM checks what a connector is."""
        return type(self.both[0])

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(connector, name) for connector in self.both]
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
    """Twin that times `build_connector_meta` of both in each step, in random order."""

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
    """Convert a value to one that compares by content: class name and fields."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case np.ndarray():
            return value.tolist()
        case dict():
            return {plain(key): plain(item) for key, item in value.items()}
        case set() | frozenset():
            return sorted(map(plain, value))
        case list() | tuple():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        fields = vars(value)
    return type(value).__name__, plain(fields)
