# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import inspect

import pytest

from kvtax.engine.preflight import require_honest_transfers
from tests.harness.tiny import BLOCK_TOKENS, Reference, TinyServers, ready
from tests.releases import INSTALLED, under_test


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine to its end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="package")
def lab(tmp_path_factory) -> TinyServers:
    require_honest_transfers()
    folder = tmp_path_factory.mktemp("transfers")
    block_tokens = BLOCK_TOKENS if INSTALLED == "0.18.1" else 2 * BLOCK_TOKENS
    return TinyServers(folder, under_test(), block_tokens)


@pytest.fixture(scope="package")
def reference(lab) -> Reference:
    """Lives to the end of this folder. test_main_job wants the machine for itself, so
    it runs before the first test that asks for this.
    """
    with ready(lab.instance()) as (single,):
        yield Reference(single)
