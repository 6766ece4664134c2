# SPDX-License-Identifier: Apache-2.0
"""A prefill instance that answers each pull as badly as it is told to."""

from __future__ import annotations

import threading
from types import ModuleType

import msgspec
import zmq

# How many empty responses to a pull come before those with content.
CONTINUED = 20


class FakePrefiller:
    """Answers on a thread once `release()` was called; `kinds` are its engine ids.

    "mixed" reports each request as the first word of its transfer id says: ok, err, or
    missing for not at all, in many responses in a row. "error" fails the whole pull,
    "garbage" answers with no valid message, and "leaver" closes instead of answering.
    """

    kinds = ("mixed", "error", "garbage", "leaver")

    def __init__(self, module: ModuleType, worker) -> None:
        self._module = module
        self._decoder = msgspec.msgpack.Decoder(module.MooncakeXferMetadata)
        self._context = zmq.Context()
        self._released = threading.Event()
        for kind in self.kinds:
            socket = self._context.socket(zmq.ROUTER)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            # What the decoder learns from the bootstrap server.
            worker._remote_agents[kind] = {0: {0: f"tcp://127.0.0.1:{port}"}}
            worker._tp_size[kind] = 1
            threading.Thread(target=self._serve, args=(kind, socket)).start()

    def _serve(self, kind: str, socket: zmq.Socket) -> None:
        try:
            while True:
                identity, message = socket.recv_multipart()
                self._released.wait()
                if kind == "leaver":
                    socket.close(linger=0)
                    return
                for answer in self._answers(kind, message):
                    socket.send_multipart((identity, answer))
        except zmq.ContextTerminated:
            socket.close(linger=0)

    def _answers(self, kind: str, message: bytes) -> list[bytes]:
        status = self._module.MooncakeXferResponseStatus
        response = self._module.MooncakeXferResponse
        if kind == "garbage":
            return [b"\xc1"]
        if kind == "error":
            return [msgspec.msgpack.encode(response(status.ERROR, err_msg="no luck"))]
        asked = self._decoder.decode(message).req_blocks
        said = {"ok": [], "err": [], "missing": []}
        for request, (transfer_id, _) in asked.items():
            said[transfer_id.split("-")[0]].append(request)
        answers = [response(status.CONTINUE) for _ in range(CONTINUED)]
        answers += [response(status.CONTINUE, err_reqs=said["err"])]
        answers += [response(status.FINISH, ok_reqs=said["ok"])]
        return [msgspec.msgpack.encode(answer) for answer in answers]

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        self._context.term()
