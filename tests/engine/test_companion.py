# SPDX-License-Identifier: Apache-2.0
"""A connector's companion is there when the engine starts, and gone when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtax.engine import ServerError
from kvtax.engine.companion import accompanied
from kvtax.engine.connector import Companion, Connector, needs_company
from kvtax.engine.installation import installation
from kvtax.paths import REPOSITORY
from tests.engine.living import alive, content, eventually, gone

# Writes what it was told, and listens where it should, if it should.
MODULE = """
import os, pathlib, socket, sys, time
port, told, manner = sys.argv[1:]
pathlib.Path(told).with_suffix(".pid").write_text(str(os.getpid()))
pathlib.Path(told).with_suffix(".seen").write_text(pathlib.Path(told).read_text())
if manner == "dies":
    sys.exit("no more memory")
server = socket.create_server(("127.0.0.1", int(port)))
time.sleep(600)
"""

OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_companion import companion_of
from kvtax.engine.companion import accompanied
from kvtax.engine.installation import installation
with accompanied(companion_of(), Path(sys.argv[1]), installation()):
    time.sleep(600)
"""


def companion_of(manner: str = "listens", module: str = "friend") -> Connector:
    return Connector(
        summary="with a companion",
        patches=[],
        kv_transfer_config={"extra": {"hosts": ["127.0.0.1:@PORT_1@"]}},
        env={"FRIEND_CONFIG": "@FOLDER@/friend.json"},
        companion=Companion(
            module=module,
            arguments=["@PORT_1@", "@FOLDER@/friend.json", manner],
            files={"friend.json": '{"port": @PORT_1@, "other": @PORT_2@}'},
        ),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "friend.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def pid_of(folder: Path) -> int:
    return int(content(folder / "friend.pid"))


def test_it_listens_and_all_places_name_the_same_port(folder):
    with accompanied(companion_of(), folder, installation()) as told:
        assert alive(pid_of(folder))
        [address] = told.kv_transfer_config["extra"]["hosts"]
        port = int(address.removeprefix("127.0.0.1:"))
        seen = content(folder / "friend.seen")
        assert seen == f'{{"port": {port}, "other": {port + 1}}}'
        assert told.env == {"FRIEND_CONFIG": f"{folder}/friend.json"}
        assert not needs_company(told)


def test_it_ends_with_the_block(folder):
    with accompanied(companion_of(), folder, installation()):
        pid = pid_of(folder)
    assert gone([pid])


def test_it_ends_when_the_engine_fails(folder):
    with (
        pytest.raises(RuntimeError, match="the engine died"),
        accompanied(companion_of(), folder, installation()),
    ):
        pid = pid_of(folder)
        raise RuntimeError("the engine died")
    assert gone([pid])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_dies_of(number, folder):
    here = str(Path(__file__).parent)
    path = os.pathsep.join([str(REPOSITORY), str(folder.parent)])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), here],
        env=os.environ | {"PYTHONPATH": path},
    )
    pid = pid_of(folder)
    os.kill(owner.pid, number)
    owner.wait()
    eventually(lambda: gone([pid]))


def test_one_that_dies_is_told_with_the_end_of_its_log(folder):
    with (
        pytest.raises(ServerError, match=r"companion did not start(.|\n)*no more mem"),
        accompanied(companion_of("dies"), folder, installation()),
    ):
        pass


def test_one_that_is_not_installed_is_told(folder):
    stranger = companion_of(module="nobody_knows_it")
    with (
        pytest.raises(ServerError, match=r"No module named nobody_knows_it"),
        accompanied(stranger, folder, installation()),
    ):
        pass


def test_without_a_companion_the_folder_is_filled_in_all_the_same(folder):
    alone = Connector(
        summary="", patches=[], kv_transfer_config={"path": "@FOLDER@/kv", "blocks": 3}
    )
    with accompanied(alone, folder, installation()) as told:
        assert told.kv_transfer_config == {"path": f"{folder}/kv", "blocks": 3}
    assert list(folder.iterdir()) == []
