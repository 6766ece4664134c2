# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
from proxy_lab import SLOW

from fleet.standin.process import Standin, standin


@pytest.fixture(scope="module")
def started() -> Iterator[list[Standin]]:
    with standin(*SLOW) as a, standin(*SLOW) as b:
        yield [a, b]


@pytest.fixture
def two(started: list[Standin]) -> list[Standin]:
    for one in started:
        one.set_faults()
    return started
