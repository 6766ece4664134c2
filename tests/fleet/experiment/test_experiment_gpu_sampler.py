# SPDX-License-Identifier: Apache-2.0
"""The GPU sampler beside a pretended nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.experiment.gpu_sampler import HEADER, row


def sampler(out: Path, path: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fleet.experiment.gpu_sampler", "--out", str(out)]
    return subprocess.Popen(
        command, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
    )


def pretend(folder: Path, script: str) -> str:
    """A PATH on which nvidia-smi is `script`."""
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    smi.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_without_nvidia_smi_nothing_is_written_and_it_says_so(tmp_path: Path) -> None:
    process = sampler(tmp_path / "gpu.csv", str(tmp_path))
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "no nvidia-smi" in said
    assert not (tmp_path / "gpu.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_samples_are_stamped_and_the_tool_ends_with_the_sampler(
    tmp_path: Path, end: signal.Signals
) -> None:
    rows = "0, 97, 40000, 412.5, 1980\n1, [N/A], 12, [N/A], 300"
    # It goes on without writing, so that no broken pipe ends it for us.
    path = pretend(tmp_path, f"echo '{rows}'; echo '{rows}'; exec sleep 600")
    out = tmp_path / "gpu.csv"
    began = time.monotonic_ns()
    process = sampler(out, path)
    deadline = time.monotonic() + 20
    while not out.exists() or out.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tool = int((tmp_path / "pid").read_text())
    process.send_signal(end)
    process.communicate(timeout=20)
    while _running(tool):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    text = out.read_text().splitlines()
    assert text[0] == HEADER
    first, second = text[1].split(","), text[2].split(",")
    assert began < int(first[0]) < time.monotonic_ns()
    assert first[1:] == ["0", "97", "40000", "412.5", "1980"]
    assert second[1:] == ["1", "", "12", "", "300"]


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_a_tool_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    process = sampler(tmp_path / "gpu.csv", pretend(tmp_path, "exit 9"))
    process.communicate(timeout=20)
    assert process.returncode == 1


def test_what_is_no_sample_is_no_row() -> None:
    assert row(1, "NVIDIA-SMI has failed, because\n") is None
