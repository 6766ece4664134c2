# SPDX-License-Identifier: Apache-2.0
"""`kvtax run` before a real server: patched, recorded, and gone when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from kvtax.engine.connector import Connector
from kvtax.engine.server import (
    READY_DEADLINE_S,
    SERVED_MODEL,
    Engine,
    http_ok,
    resolve,
    tail,
)
from kvtax.look.discover import discover
from kvtax.look.instances import read_instance
from kvtax.paths import REPOSITORY
from kvtax.proc.supervise import descendants
from tests.engine.living import gone
from tests.harness.tiny.checkpoint import MAX_TOKENS, write_checkpoint
from tests.harness.tiny.server import tiny_settings
from tests.harness.tiny.servers import KV_TRANSFER
from tests.releases import under_test

pytestmark = pytest.mark.e2e

FIX = "mooncake_get_finished_short_circuit"
END_S = 300.0


@pytest.fixture
def scratch():
    # Not tmp_path: vLLM has its sockets there, and their paths have 107 bytes at most.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_server_is_patched_and_recorded_and_leaves_nothing(tmp_path, scratch):
    installed = under_test()
    connector = Connector(
        "", [], kv_transfer_config=KV_TRANSFER["mooncake"] | {"kv_role": "kv_both"}
    )
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=1)
    settings = tiny_settings(MAX_TOKENS, 8)
    engine = Engine(None, settings, connector, checkpoint, installed)
    server = resolve(engine, tmp_path, {})
    vllm = installed.package("vllm")
    before = {path: path.read_bytes() for path in vllm.rglob("*.py")}
    records = tmp_path / "records"
    run = [sys.executable, "-m", "kvtax", "run", "--records", str(records)]
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            [*run, "--fix", FIX, "mooncake_cpu_layout", "--", *server.argv],
            env=server.env | {"TMPDIR": str(scratch)},
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://{server.ports.host}:{server.ports.http}"
        wait_ready(process, url, server.log)
        assert complete(url) == 8
        (overlay,) = scratch.glob("kvtax-run-*")
        # Code that a process has imported.
        assert [*overlay.rglob("mooncake_connector.py.*.code")]
        processes = [process.pid, *descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0, tail(server.log)
        assert gone(processes)
        assert not overlay.exists()
    finally:
        process.kill()
    text = server.log.read_text()
    assert (
        f"in {vllm.resolve()} gets {FIX}, mooncake_cpu_layout, step_timing_v2" in text
    )
    assert {path: path.read_bytes() for path in vllm.rglob("*.py")} == before
    (found,), warnings = discover(records)
    assert warnings == []
    steps = read_instance(found).steps
    assert steps["decode_tokens"].sum() >= 7
    assert steps["worker.get_finished_us"].is_not_null().any()


def wait_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while not http_ok(f"{url}/health"):
        assert process.poll() is None, tail(log)
        assert time.monotonic() < deadline_s, tail(log)
        time.sleep(0.2)


def complete(url: str) -> int:
    """Number of tokens that the server answers with."""
    body = {"model": SERVED_MODEL, "prompt": [*range(40)], "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["usage"]["completion_tokens"]
