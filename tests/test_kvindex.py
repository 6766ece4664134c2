# SPDX-License-Identifier: Apache-2.0
"""The prefix index is in Go and has its own tests; those of its core run here too."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve

KVINDEX = Path(__file__).parents[1] / "kvindex"


# The other tests start no goroutine, so that the race detector finds nothing in them.
CONCURRENT = re.findall(
    r"^func (Test\w+)", (KVINDEX / "concurrency_test.go").read_text(), re.M
)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25")
@pytest.mark.skipif(not shutil.which("gcc"), reason="the race detector needs gcc")
@pytest.mark.parametrize(
    "options", [[], ["-race", "-run", f"^({'|'.join(CONCURRENT)})$"]]
)
def test_core_passes_its_tests_and_the_concurrent_ones_under_the_race_detector(options):
    command = ["go", "test", *options, "./..."]
    result = subprocess.run(command, cwd=KVINDEX, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


PATIENCE_MS = 60_000


@pytest.mark.slow
def test_it_subscribes_to_all_and_takes_each_message(tmp_path):
    endpoint, port = f"ipc://{tmp_path}/events", reserve(1)[0].http
    # It waits for the subscriber instead of dropping messages.
    publisher = zmq.Context.instance().socket(zmq.XPUB)
    publisher.setsockopt(zmq.XPUB_NODROP, 1)
    publisher.setsockopt(zmq.SNDHWM, 1)
    publisher.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    publisher.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    module = [sys.executable, "-m", "connectors.kv_events_subscriber"]
    with (
        publisher,
        subprocess.Popen([*module, endpoint, str(port)], cwd=REPOSITORY) as it,
    ):
        try:
            publisher.bind(endpoint)
            assert publisher.recv() == b"\x01", "subscribed to all topics"
            for _ in range(20_000):
                publisher.send_multipart([b"", bytes(8), bytes(1_000)])
            socket.create_connection(("127.0.0.1", port)).close()
            assert it.poll() is None
        finally:
            it.kill()
