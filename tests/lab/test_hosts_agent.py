# SPDX-License-Identifier: Apache-2.0
"""An agent's process does what it is asked, and is gone when the agent is."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from living import alive, eventually

from lab.hosts.agent import Agent, AgentError
from lab.hosts.code import Code, differences, source_sha256
from lab.paths import REPOSITORY

MODULE = "tests.hosts.squares"

# An agent that waits for work, in a process that can be killed.
OWNER = f"""
import time
from lab.hosts.agent import Agent
agent = Agent("{MODULE}", {{}})
print(agent._folder, agent._process.supervisor_pid, flush=True)
agent.run(b"2 60")
"""


def square(packed: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return int(tar.extractfile("./square").read())


def test_tasks_that_come_together_each_get_their_own_result():
    agent = Agent(MODULE, {})
    try:
        with ThreadPoolExecutor(20) as threads:
            tasks = [f"{value} {value % 3 / 20}".encode() for value in range(40)]
            found = [square(packed) for packed in threads.map(agent.run, tasks)]
    finally:
        agent.close()
    assert found == [value**2 for value in range(40)]
    assert not Path(agent._folder).exists()


def test_the_last_words_of_a_process_that_ends_are_told():
    agent = Agent(MODULE, {})
    try:
        with pytest.raises(AgentError, match="these are my last words"):
            agent.run(b"die")
    finally:
        agent.close()


def test_nothing_outlives_an_agent_that_is_killed():
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as owner:
        folder, supervisor = owner.stdout.readline().split()
        assert (Path(folder) / "tasks").is_dir()
        owner.kill()
    eventually(lambda: not Path(folder).exists() and not alive(int(supervisor)))


def test_a_byte_or_a_name_makes_other_code_and_bytecode_does_not(tmp_path):
    (tmp_path / "lab").mkdir()
    file = tmp_path / "lab" / "a.py"
    file.write_text("1")
    before = source_sha256(tmp_path)
    (tmp_path / "lab" / "__pycache__").mkdir()
    (tmp_path / "lab" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("x")
    assert source_sha256(tmp_path) == before
    file.write_text("2")
    changed = source_sha256(tmp_path)
    file.rename(tmp_path / "lab" / "b.py")
    assert len({before, changed, source_sha256(tmp_path)}) == 3


def test_what_differs_between_hosts_is_named():
    here = Code("s", "e", "0.18.1", "3.11.7")
    assert differences(here, here) == []
    there = Code("s", "other", "0.18.1", "3.12.1")
    assert differences(here, there) == [
        "environment other there, e here",
        "Python 3.12.1 there, 3.11.7 here",
    ]
