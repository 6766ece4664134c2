# SPDX-License-Identifier: Apache-2.0
"""setup.sh says what is missing and what to do where it cannot install it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cat", "cmp", "dirname", "flock", "grep", "mkdir", "rm", "uname")


class Machine:
    """A copy of setup.sh and a PATH that holds just what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.venv = self.checkout / ".venv"
        self.lock = self.checkout / "locks" / "cpu.txt"
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.checkout / "locks").mkdir(parents=True)
        shutil.copy(REPOSITORY / "setup.sh", self.checkout)
        for name in ("cpu.txt", "gpu.txt"):
            (self.checkout / "locks" / name).write_text("a-package==1.0\n")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.has("ldconfig")

    def has(self, command: str, script: str = "") -> None:
        file = self.bin / command
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def has_libraries(self) -> None:
        names = ("ibverbs.so.1", "numa.so.1", "curl.so.4", "tcmalloc_minimal.so.4")
        self.has("ldconfig", "\n".join(f"echo 'lib{name} (libc6)'" for name in names))

    def has_tools(self) -> None:
        """A machine where all but the locked environment is in place."""
        self.has_libraries()
        self.has("python3", "echo /usr/bin/python3")
        self.has("uv", 'mkdir -p .venv; echo "$@" >>uv_calls')

    def setup(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.bin / "bash", self.checkout / "setup.sh", *arguments],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_missing_libraries_are_named_where_nothing_can_be_installed(machine):
    done = machine.setup()
    assert done.returncode == 1
    for package in ("libtcmalloc-minimal4", "libibverbs1", "libnuma1", "libcurl4"):
        assert package in done.stderr


def test_a_gpu_machine_is_not_asked_for_the_cpu_workers_library(machine):
    assert "libtcmalloc" not in machine.setup("gpu").stderr


def test_a_package_that_cannot_be_installed_is_named(machine):
    machine.has("apt-get", "[[ $1 == update ]]")
    machine.has("env", 'while [[ $1 == *=* ]]; do shift; done; exec "$@"')
    machine.has("sudo", 'shift; exec "$@"')
    done = machine.setup()
    assert done.returncode == 1
    assert "could not install any of" in done.stderr


def test_a_machine_without_a_fitting_python_is_told_which_one_it_takes(machine):
    machine.has_libraries()
    machine.has("python3", "exit 1")
    done = machine.setup()
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in done.stderr


def test_an_unknown_flavour_is_refused(machine):
    done = machine.setup("tpu")
    assert done.returncode == 1
    assert "cpu or gpu" in done.stderr


def test_an_installation_that_failed_is_not_taken_for_a_good_one(machine):
    machine.has_tools()
    machine.setup()
    machine.has("uv", "exit 9")
    for lock in ("a-package==2.0\n", "a-package==1.0\n"):
        machine.lock.write_text(lock)
        assert machine.setup().returncode == 9


def test_nothing_is_done_when_the_lock_is_installed_already(machine):
    machine.has_tools()
    machine.setup()
    machine.has("uv", "exit 9")
    done = machine.setup()
    assert (done.returncode, done.stdout) == (0, "")


def test_an_environment_from_before_bytecode_was_kept_gets_it_once(machine):
    machine.has_tools()
    machine.venv.mkdir()
    shutil.copy(machine.lock, machine.venv / ".installed_lock")
    machine.setup()
    machine.setup()
    calls = (machine.checkout / "uv_calls").read_text().splitlines()
    (sync,) = (call for call in calls if call.startswith("pip sync"))
    assert "--compile-bytecode" in sync
