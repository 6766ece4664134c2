# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvtax import cli
from tests.look.made_up_server import Server


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path / "records")


def main(arguments: list[str]) -> int:
    """Run `kvtax look` in this process; return its exit code."""
    return cli.main(["look", *arguments])
