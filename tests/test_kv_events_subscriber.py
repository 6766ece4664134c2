# SPDX-License-Identifier: Apache-2.0
"""The subscriber of a measured engine takes every event, as a router does."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import zmq

from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve

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
