# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import signal

import pytest


@pytest.fixture(autouse=True)
def signals():
    """Commands take the signals over."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
