# SPDX-License-Identifier: Apache-2.0
"""Modules that are imported and never called, on a machine that lacks them.

A venv of `studies.gpu.bare` imports this at its start. Whatever such a module is asked
for does nothing where vLLM is imported, and raises where its value is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Anything:
    """Name of a module that is not there; `name` says which."""

    def __init__(self, name: object = "", *_: object) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Anything:
        return self

    def __getitem__(self, _: object) -> Anything:
        return self

    def __mro_entries__(self, _: object) -> tuple[()]:
        return ()

    def __instancecheck__(self, _: object) -> bool:
        return False

    def __bool__(self) -> bool:
        raise RuntimeError(f"{self._name} was called, and has a stand-in here")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(f"{self._name} was called, and has a stand-in here")

    __int__ = __float__ = __len__ = __index__ = __bool__
    __add__ = __radd__ = __sub__ = __mul__ = __truediv__ = __or__ = __ror__ = __call__


class StandIns(MetaPathFinder, Loader):
    """Finds the modules of `packages`, unless they are installed."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return a spec of one of the packages, or of a module in it."""
        if name.partition(".")[0] in self._packages:
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module all names."""
        module.__dict__["__getattr__"] = Anything(module.__name__).__getattr__


def install(packages: Iterable[str]) -> None:
    """Let `packages` be imported where they are missing."""
    sys.meta_path.append(StandIns(packages))
