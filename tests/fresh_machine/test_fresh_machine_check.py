# SPDX-License-Identifier: Apache-2.0
"""check.sh says what it needs, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.proc.living import eventually

CHECK = Path(__file__).with_name("check.sh")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
# Stands in for mmdebstrap: it mounts something, and takes for ever.
WAITING = "mount -t tmpfs mounted $TMPDIR/mounted; exec sleep {seconds}"


def start(folder: Path, *cases: str, mmdebstrap: str | None = None) -> subprocess.Popen:
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for tool in Path("/usr/bin"), Path("/bin"):
        for file in tool.iterdir():
            if file.name != "mmdebstrap" and not (tools / file.name).exists():
                (tools / file.name).symlink_to(file)
    if mmdebstrap:
        (tools / "mmdebstrap").write_text(f"#!/bin/bash\n{mmdebstrap}\n")
        (tools / "mmdebstrap").chmod(0o755)
    return subprocess.Popen(
        ["/bin/bash", CHECK, *cases],
        env=os.environ | {"PATH": str(tools), "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )


def runs(command: str) -> bool:
    """Whether a process of this command is there, in any namespace of ours."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True)
    return command in listed.stdout.splitlines()


@needs_root
def test_it_says_which_package_is_missing(tmp_path):
    _, said = start(tmp_path).communicate()
    assert "mmdebstrap is missing: apt-get install" in said


@needs_root
@pytest.mark.parametrize("case", ["sarge/root", "bookworm/nobody", "bookworm"])
def test_a_case_that_it_does_not_know_is_refused(tmp_path, case):
    check = start(tmp_path, case, mmdebstrap="exit 1")
    _, said = check.communicate()
    assert check.returncode == 2
    assert "bookworm trixie; root sudo user" in said


def test_without_root_it_says_so():
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*(nobody if os.geteuid() == 0 else []), "bash", "-s"]
    done = subprocess.run(
        command, input=CHECK.read_text(), capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 2
    assert "run this as root" in done.stderr


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_of_it_is_left(tmp_path, end):
    seconds = 10**6 + os.getpid()  # By which we know it.
    waiting = f"sleep {seconds}"
    script = WAITING.format(seconds=seconds)
    (tmp_path / "mounted").mkdir()
    check = start(tmp_path, "bookworm/root", mmdebstrap=script)
    while not runs(waiting):
        assert check.poll() is None
        time.sleep(0.05)
    check.send_signal(end)
    check.communicate()
    eventually(lambda: not runs(waiting))
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    if end == signal.SIGKILL:  # Then the next run cleans up.
        start(tmp_path, "bookworm/root", mmdebstrap="exit 1").communicate()
    assert not (tmp_path / "kvtax-fresh-machine").exists()
