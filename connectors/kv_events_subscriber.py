# SPDX-License-Identifier: Apache-2.0
"""A subscriber of an engine's KV events, as a router is: `ENDPOINT PORT`.

It takes each message and throws it away. PORT listens once it has subscribed.
"""

from __future__ import annotations

import socket
import sys

import zmq


def main() -> None:
    """Subscribe until the process ends."""
    endpoint, port = sys.argv[1:]
    subscriber = zmq.Context().socket(zmq.SUB)
    subscriber.connect(endpoint)
    subscriber.subscribe(b"")
    with socket.create_server(("127.0.0.1", int(port))):
        while True:
            subscriber.recv_multipart()


if __name__ == "__main__":
    main()
