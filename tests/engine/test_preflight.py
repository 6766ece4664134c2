# SPDX-License-Identifier: Apache-2.0
"""What would make a sweep fail or lie is found before it starts."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtax.engine import ServerError, preflight, transfer_check
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.environment import cpu_preload
from kvtax.engine.installation import Installation, installation
from kvtax.engine.preflight import PreflightError
from kvtax.engine.transfer_check import FEW_ROUNDS
from kvtax.paths import REPOSITORY
from kvtax.proc.machine_lock import supervisors
from kvtax.proc.supervise import Supervised, descendants
from microbench.profile import load_profile
from tests.proc.living import eventually


def with_mooncake(version: str) -> Installation:
    """This installation, as if it had that release."""
    name = "mooncake-transfer-engine-non-cuda"
    ours = installation()
    return dataclasses.replace(ours, versions=ours.versions | {name: version})


@pytest.mark.parametrize("version", ["0.3.10", "0.3.11.post1"])
def test_a_mooncake_that_reports_writes_too_early_is_refused(version):
    with pytest.raises(PreflightError, match=rf"{version}.*0\.3\.12"):
        preflight.check_connector(
            load_connector("mooncake_both"), with_mooncake(version)
        )


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "0.4"])
def test_a_mooncake_without_that_race_is_accepted(version):
    preflight.check_connector(load_connector("mooncake_both"), with_mooncake(version))


def test_a_connector_whose_package_is_missing_is_refused_by_name():
    wanting = Connector(summary="", patches=[], package="no_such_one")
    with pytest.raises(PreflightError, match="no_such_one is not installed"):
        preflight.check_connector(wanting)


def test_a_config_without_a_connector_needs_no_package():
    preflight.check_connector(Connector(summary="", patches=[]))


@pytest.mark.slow
def test_a_server_of_another_run_is_waited_for_and_then_refused(tmp_path, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    # A supervisor that is not below us: as one left by a sweep killed just now.
    monkeypatch.setattr(preflight, "descendants", lambda pid: [])
    with Supervised(sleeper, dict(os.environ), tmp_path / "log") as survivor:
        # Others on this machine do not count: they may go on for longer.
        ours = {survivor.supervisor_pid}
        monkeypatch.setattr(preflight, "supervisors", lambda: supervisors() & ours)
        # It makes itself known a moment after its start.
        while not supervisors() & ours:
            time.sleep(0.01)
        monkeypatch.setattr(preflight, "SURVIVOR_DEADLINE_S", 0.5)
        with pytest.raises(PreflightError, match="servers of another run"):
            preflight._await_survivors()
        monkeypatch.setattr(preflight, "SURVIVOR_DEADLINE_S", 30)
        stopping = threading.Timer(0.5, survivor.stop)
        stopping.start()
        preflight._await_survivors()
        stopping.join()


def test_all_that_is_missing_is_said_at_once(monkeypatch):
    monkeypatch.setattr(preflight, "_available_gib", lambda: 1.0)
    monkeypatch.setattr(preflight, "MIN_DISK_GIB", 1e9)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PreflightError) as refused:
        preflight.check_machine(load_profile("gpu"))
    for reason in ("run bash setup.sh gpu", "nvidia-smi", "of memory", "of disk"):
        assert reason in str(refused.value)


def test_the_preloaded_libraries_need_no_sbin_in_path(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert len(cpu_preload()) == 2


@pytest.mark.parametrize("separator", " :")
def test_a_path_that_the_loader_would_split_is_refused(separator):
    prefix = f"/home/me/my{separator}checkout/.venv"
    ours = dataclasses.replace(installation(), prefix=prefix)
    with pytest.raises(ServerError, match="move the checkout"):
        cpu_preload(ours)
    with pytest.raises(ServerError, match="make the environment again"):
        cpu_preload(dataclasses.replace(ours, python="/home/me/python"))


def test_a_library_that_the_loader_would_skip_is_named(tmp_path):
    ours = dataclasses.replace(installation(), prefix=str(tmp_path))
    with pytest.raises(ServerError, match=r"setup\.sh.*libiomp5\.so"):
        cpu_preload(ours)
    with pytest.raises(ServerError, match=r"/home/me/python needs.*libiomp5\.so"):
        cpu_preload(dataclasses.replace(ours, python="/home/me/python"))


CHECK = """
import sys
from kvtax.engine.transfer_check import check, verdict
from kvtax.signals import exit_on_signals
exit_on_signals()
print(verdict(check(int(sys.argv[1]))))
"""
COMMAND = [sys.executable, "-c", CHECK]
LIAR = "mooncake-transfer-engine-non-cuda==0.3.11.post1"
LATE_MS = 300
DEADLINE_S = 120.0

# Stands in for mooncake.engine and writes through the peer's /proc entry, so that its
# port is the peer's process id.
ENGINE = f"""
import ctypes, os, threading, time

class TransferEngine:
    def initialize(self, host, metadata_server, protocol, device):
        assert (host, metadata_server, protocol) == ("127.0.0.1", "P2PHANDSHAKE", "tcp")
        return -7 if manner == "refuses" else 0

    def batch_register_memory(self, addresses, lengths):
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def batch_transfer_sync_write(self, peer, sources, targets, lengths):
        if manner == "crashes":
            os.abort()
        if manner == "hangs":
            open(__file__ + ".hangs", "w").close()
            ctypes.PyDLL(None).sleep(600)  # not one bytecode more is run meanwhile
        if manner == "fails":
            return -9
        pid = int(peer.rpartition(":")[2])
        writing = threading.Thread(
            target=self.copy, args=(pid, sources, targets, lengths)
        )
        writing.start()
        if manner != "returns early":
            writing.join()
        return 0

    def copy(self, pid, sources, targets, lengths):
        if manner == "returns early":
            time.sleep({LATE_MS / 1000})
        with open(f"/proc/{{pid}}/mem", "wb", buffering=0) as memory:
            for source, target, length in zip(sources, targets, lengths):
                run = bytearray(ctypes.string_at(source, length))
                if manner == "leaves a hole":
                    run[length // 2] ^= 1
                os.pwrite(memory.fileno(), run, target)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put an engine of the given manner, version 9.9, before the installed one."""

    def install(manner: str) -> None:
        package, metadata = tmp_path / "mooncake", tmp_path / "standin-9.9.dist-info"
        package.mkdir()
        metadata.mkdir()
        (package / "__init__.py").touch()
        (package / "engine.py").write_text(f"manner = {manner!r}\n{ENGINE}")
        (metadata / "METADATA").write_text("Name: standin\nVersion: 9.9\n")
        (metadata / "top_level.txt").write_text("mooncake\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def verdict(rounds: int) -> str:
    return transfer_check.verdict(transfer_check.check(rounds))


@pytest.mark.slow
def test_an_engine_that_writes_before_it_returns_is_honest(installed):
    installed("writes")
    assert verdict(3) == (
        "standin 9.9 is honest over TCP: "
        "3 of 3 writes of 32 MiB were complete when they returned"
    )


@pytest.mark.slow
def test_an_engine_that_returns_early_is_found_with_how_late_it_was(installed):
    installed("returns early")
    line = verdict(3)
    assert "standin 9.9 LIES" in line
    assert "3 of 3 writes" in line
    assert "Install standin>=0.3.12" in line
    median_ms, worst_ms = map(float, re.findall(r"([\d.]+) ms", line))
    assert LATE_MS <= median_ms <= worst_ms < transfer_check.ARRIVAL_LIMIT_MS


@pytest.mark.slow
def test_one_byte_that_never_arrives_is_found_and_ends_the_rounds(installed):
    installed("leaves a hole")
    line = verdict(1000)
    assert "1 of 1 writes" in line
    assert "over 2000 ms at worst" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("refuses", "TransferEngine.initialize returned -7"),
        ("fails", "batch_transfer_sync_write returned -9"),
        ("crashes", "the engines ended with status 250"),
    ],
)
def test_engines_that_fail_give_no_verdict_and_the_reason(installed, manner, reason):
    installed(manner)
    with pytest.raises(transfer_check.NoVerdict, match=reason):
        transfer_check.check(3)


@pytest.mark.slow
def test_an_engine_that_hangs_is_given_up_in_time(installed, monkeypatch):
    installed("hangs")
    monkeypatch.setattr(transfer_check, "START_LIMIT_S", 2.0)
    # What an earlier test left to die may still be there.
    before = set(descendants(os.getpid()))
    with pytest.raises(transfer_check.NoVerdict, match="not done after 4 s"):
        transfer_check.check(4)
    left = set(descendants(os.getpid())) - before
    assert not {pid: cmdline(pid) for pid in left}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_check_that_dies_in_a_write(
    installed, tmp_path, monkeypatch, number
):
    installed("hangs")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with subprocess.Popen([*COMMAND, "100"], cwd=REPOSITORY) as run:
        try:
            eventually((tmp_path / "mooncake" / "engine.py.hangs").exists)
            started = descendants(run.pid)
            # The supervisor, the writer and the receiver.
            assert sum("transfer_pair" in cmdline(pid) for pid in started) == 3
            run.send_signal(number)
            status = run.wait(DEADLINE_S)
        finally:
            run.kill()
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    eventually(lambda: not any(cmdline(pid) for pid in started))
    assert not list(scratch.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manner", "complaint"), [("returns early", "LIES"), ("refuses", "returned -7")]
)
def test_tokens_are_not_checked_with_an_engine_that_looks_new_but_is_not_honest(
    installed, monkeypatch, manner, complaint
):
    installed(manner)
    monkeypatch.setattr(preflight, "_check_mooncake_version", lambda _: None)
    monkeypatch.setattr(transfer_check, "FEW_ROUNDS", 2)
    preflight._transfer_complaint.cache_clear()
    try:
        with pytest.raises(PreflightError, match=complaint):
            preflight.require_honest_transfers()
        # Looked at once: nothing is started for the next config.
        monkeypatch.delattr(transfer_check, "check")
        with pytest.raises(PreflightError, match=complaint):
            preflight.check_connector(load_connector("mooncake_both"))
    finally:
        preflight._transfer_complaint.cache_clear()


@pytest.mark.slow
def test_the_installed_mooncake_is_honest_also_to_two_who_ask_at_once():
    runs = [
        subprocess.Popen(
            [*COMMAND, "5"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], answers
    assert all("5 of 5" in answer for answer in answers)


@pytest.mark.slow
@pytest.mark.long  # pip fetches it
def test_a_mooncake_known_to_lie_is_found_in_the_few_rounds_of_the_preflight(
    tmp_path, monkeypatch
):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    fetched = subprocess.run(
        [*pip, "--target", str(tmp_path), LIAR], capture_output=True, text=True
    )
    if fetched.returncode != 0:
        pytest.skip(f"{LIAR} cannot be fetched: {fetched.stderr.strip()[-200:]}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "0.3.11.post1 LIES" in verdict(FEW_ROUNDS)


def cmdline(pid: int) -> str:
    """Empty if the process is gone, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
