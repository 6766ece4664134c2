# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import uvloop
from fleet.tests.proxy.proxy_lab import SLOW
from tests.harness.standin.process import Standin, standin


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, as the proxy runs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    uvloop.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with standin(*SLOW) as a, standin(*SLOW) as b:
        yield [a, b]


@pytest.fixture
def two(started: list[Standin]) -> list[Standin]:
    for each in started:
        each.set_faults()
    return started
