# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from made_up_server import Server


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path / "records")
