# SPDX-License-Identifier: Apache-2.0
from contextlib import closing

import pytest

from connectors.direct_read.client import Client
from connectors.direct_read.tests.fakes import SECRET, FakeLedger, serving


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def serves(ledger):
    with serving(ledger) as serves:
        yield serves


@pytest.fixture
def client(serves):
    with closing(Client("127.0.0.1", serves.port, SECRET)) as client:
        yield client
