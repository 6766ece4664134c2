# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtax import cli
from kvtax.look.instances import Instance, read_instances
from tests.look.made_up_server import Server, served


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path / "records")


@pytest.fixture
def records(tmp_path) -> Path:
    """Records of 400 steps and 50 requests."""
    return served(tmp_path / "records").write()


def main(arguments: list[str]) -> int:
    """Run `kvtax look` in this process; return its exit code."""
    return cli.main(["look", *arguments])


def only(folder: Path) -> Instance:
    """Read the instance of a folder that has one."""
    ((instance,), warnings) = read_instances(folder)
    assert warnings == []
    return instance


def page_data(page: Path) -> dict:
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(data)
