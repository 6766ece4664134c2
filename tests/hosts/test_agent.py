# SPDX-License-Identifier: Apache-2.0
"""An agent's process does what it is asked, and is gone when the agent is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvtax.hosts import store as store_module
from kvtax.hosts.agent import ALONE_STATUS, Agent, AgentError
from kvtax.hosts.code import Code, differences, source_sha256
from kvtax.hosts.errors import HostRefused
from kvtax.hosts.results import Place, Unstored
from kvtax.hosts.store import Store, store_of_run
from kvtax.paths import REPOSITORY
from tests.engine.living import alive, eventually

MODULE = "tests.hosts.squares"

# An agent that waits for work, in a process that can be killed.
OWNER = f"""
import time
from kvtax.hosts.agent import Agent
agent = Agent("{MODULE}", {{}})
print(agent._folder, agent._process.supervisor_pid, flush=True)
agent.run(b"2 60")
"""


def square(packed: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return int(tar.extractfile("./square").read())


@pytest.fixture
def agent() -> Iterator[Agent]:
    with closing(Agent(MODULE, {})) as agent:
        yield agent
    assert not agent._folder.exists()


def test_tasks_that_come_together_each_get_their_own_result(agent: Agent):
    with ThreadPoolExecutor(20) as threads:
        tasks = [f"{value} {value % 3 / 20}".encode() for value in range(40)]
        found = [square(packed) for packed in threads.map(agent.run, tasks)]
    assert found == [value**2 for value in range(40)]


def test_the_last_words_of_a_process_that_ends_are_told(agent: Agent):
    with pytest.raises(AgentError, match="these are my last words"):
        agent.run(b"die")


@pytest.mark.slow
def test_nothing_outlives_an_agent_that_is_killed():
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as owner:
        folder, supervisor = owner.stdout.readline().split()
        assert (Path(folder) / "tasks").is_dir()
        owner.kill()
    eventually(lambda: not Path(folder).exists() and not alive(int(supervisor)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closing", "longest_s", "status"),
    [("pass", 600, ALONE_STATUS), ("agent.close()", 1, 0)],
)
def test_an_agent_that_nobody_greets_ends_its_process_unless_it_was_closed(
    closing: str, longest_s: int, status: int
):
    program = f"""
import time
from kvtax.hosts import agent as module
module.ALONE_S = 0.1
agent = module.Agent("{MODULE}", {{}})
print(agent._folder, flush=True)
{closing}
time.sleep({longest_s})
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    assert ended.returncode == status
    assert not Path(ended.stdout.decode().strip()).exists()


def place(store: Store, name: str) -> Place:
    return Place(store.url, store.word, name, "what was asked", "10.0.0.1")


def test_with_a_store_a_result_is_there_and_does_not_come_back(
    agent: Agent, tmp_path: Path
):
    store = store_of_run(str(tmp_path), "run", resume=False)
    piece = agent.run(b"7 0", place(store, "plain/r0"))
    assert store.pieces() == {"plain/r0": piece}
    assert (piece.work, piece.host) == ("what was asked", "10.0.0.1")
    store.fetch("plain/r0", piece, tmp_path / "fetched")
    assert (tmp_path / "fetched" / "square").read_text() == "49"
    assert list((agent._folder / "results").iterdir()) == []


def test_a_result_that_the_store_refuses_is_not_lost(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.6)
    store = store_of_run(str(tmp_path), "run", resume=False)
    (tmp_path / "run" / "plain").write_text("in the way")
    result = agent.run(b"7 0", place(store, "plain/r0"))
    assert isinstance(result, Unstored)
    assert square(result.packed) == 49
    assert "refused for 1 s" in result.why
    assert store.pieces() == {}


def test_a_host_that_does_not_see_the_store_does_not_begin(
    agent: Agent, tmp_path: Path
):
    store = store_of_run(str(tmp_path), "run", resume=False)
    elsewhere = Place(f"file://{tmp_path}/own", store.word, "r0", "", "10.0.0.1")
    with pytest.raises(HostRefused, match="name a folder that all hosts share"):
        agent.run(b"die", elsewhere)
    assert square(agent.run(b"3 0")) == 9


@pytest.mark.skipif(os.geteuid() != 0, reason="to mount needs root")
def test_what_is_made_on_a_full_disk_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", disk]
    subprocess.run(command, check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    store = store_of_run(str(tmp_path / "store"), "run", resume=False)
    try:
        with closing(Agent(MODULE, {})) as agent:
            agent.run(b"2 0", place(store, "r0"))
            (disk / "others").write_bytes(bytes(60 << 20))
            with pytest.raises(HostRefused, match=r"its disk is full: .* MiB free"):
                agent.run(b"3 0", place(store, "r1"))
            with pytest.raises(HostRefused, match="its disk is full"):
                agent.run(b"die", place(store, "r2"))
        assert list(store.pieces()) == ["r0"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_byte_or_a_name_makes_other_code_and_bytecode_does_not(tmp_path):
    (tmp_path / "kvtax").mkdir()
    file = tmp_path / "kvtax" / "a.py"
    file.write_text("1")
    before = source_sha256(tmp_path)
    (tmp_path / "kvtax" / "__pycache__").mkdir()
    (tmp_path / "kvtax" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("x")
    assert source_sha256(tmp_path) == before
    file.write_text("2")
    changed = source_sha256(tmp_path)
    file.rename(tmp_path / "kvtax" / "b.py")
    assert len({before, changed, source_sha256(tmp_path)}) == 3


def test_what_differs_between_hosts_is_named():
    here = Code("s", "e", "0.18.1", "3.11.7")
    assert differences(here, here) == []
    there = Code("s", "other", "0.18.1", "3.12.1")
    assert differences(here, there) == [
        "environment other there, e here",
        "Python 3.12.1 there, 3.11.7 here",
    ]
