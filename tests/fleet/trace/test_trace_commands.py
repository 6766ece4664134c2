# SPDX-License-Identifier: Apache-2.0
"""`python -m fleet.trace`: an output is written whole or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from trace_commands import MOONCAKE, fails

from fleet.trace import Request, own


@pytest.mark.slow
def test_nothing_is_written_of_a_torn_trace(tmp_path, capsys):
    torn = tmp_path / "torn.gz"
    torn.write_bytes(MOONCAKE.read_bytes()[:-500])
    rest = ("--target-requests", 5, "--seed", 0, "--out", tmp_path / "cut")
    fails(capsys, "torn gzip data", "sample", torn, *rest)
    fails(capsys, "torn gzip data", "stats", torn)
    assert list(tmp_path.iterdir()) == [torn]


def test_an_output_that_cannot_be_written_is_an_error(tmp_path, capsys):
    out = tmp_path / "nowhere" / "t"
    fails(capsys, "No such file", "synth", "--sessions", 3, "--out", out)


def test_an_older_output_stays_if_writing_fails(tmp_path):
    out = tmp_path / "t"
    out.write_text("older")
    with pytest.raises(own.TraceError, match="1 requests came, 2 were counted"):
        own.write(out, {"requests": 2}, [Request(0.0, "a", 0, 1, 1, [], 16)])
    assert out.read_text() == "older"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_command_leaves_no_partial_trace(tmp_path, number):
    out = tmp_path / "t.jsonl"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fleet.trace",
            "synth",
            "--sessions=100000",
            "--out",
            out,
        ]
    )
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 1 << 20 for p in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert not list(tmp_path.iterdir())
