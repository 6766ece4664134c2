# SPDX-License-Identifier: Apache-2.0
"""Routing by KV events: stand-ins for servers, events as vLLM makes them, kvindexd."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from proxy_lab import ask, connect, first_event, post, proxy, until

from fleet.instances import write_instances
from fleet.standin.process import standin
from lab.records.instances import Instance
from lab.serving.kvindexd import HASH_SEED, kvindexd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("go"), reason="needs Go 1.25"),
]
BLOCK = 4


def sha256(value: object) -> bytes:
    """vllm/utils/hashing.py."""
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


class Publisher:
    """The KV events of an instance and their replay, as vLLM 0.28 has them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.events = f"ipc://{folder}/{name}"
        self.replay = f"{self.events}.replay"
        self._sent: list[tuple[bytes, bytes, bytes]] = []
        context = zmq.Context.instance()
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._pub.bind(self.events)
        self._router.bind(self.replay)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def store(self, ids: list[int]) -> None:
        """The blocks of a prompt."""
        hashes = [sha256(HASH_SEED)]
        for start in range(0, len(ids), BLOCK):
            block = tuple(ids[start : start + BLOCK])
            hashes.append(sha256((hashes[-1], block, None)))
        self.publish(
            type="BlockStored",
            block_hashes=hashes[1:],
            parent_block_hash=None,
            token_ids=ids,
            block_size=BLOCK,
        )

    def publish(self, **event: object) -> None:
        number = len(self._sent).to_bytes(8, "big")
        payload = msgspec.msgpack.encode([time.time(), [event]])
        self._sent.append((b"", number, payload))
        self._pub.send_multipart(self._sent[-1])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._pub.close(0)
        self._router.close(0)

    def _repeat(self) -> None:
        end = b"", (-1).to_bytes(8, "big", signed=True), b""
        while not self._stop.is_set():
            if self._router.poll(20):
                client, _, first = self._router.recv_multipart()
                for one in [*self._sent[int.from_bytes(first, "big") :], end]:
                    self._router.send_multipart((client, b"", *one))


@contextmanager
def two(folder: Path) -> Iterator[tuple[list[Instance], Publisher]]:
    """Instances a and b, and the events of b."""
    publishers = [Publisher(folder, name) for name in "ab"]
    try:
        with standin() as a, standin() as b:
            instances = [
                Instance(
                    name,
                    at.url,
                    kv_events=one.events,
                    kv_events_replay=one.replay,
                )
                for name, at, one in zip("ab", (a, b), publishers, strict=True)
            ]
            yield instances, publishers[1]
    finally:
        for one in publishers:
            one.close()


def test_ids_are_routed_by_the_events_and_text_says_that_it_is_not(
    tmp_path: Path,
) -> None:
    prompt = list(range(40))
    with two(tmp_path) as (instances, publisher):
        publisher.store(prompt)
        file = tmp_path / "instances.json"
        write_instances(file, instances)
        with (
            kvindexd(file, tmp_path / "kvindexd.log") as address,
            proxy(tmp_path, instances, "lmetric", "--kvindexd", address) as on,
        ):
            until(
                lambda: on.instances()["b"]["cache"]["exact_tokens"] == 40,
                "the events of before did not arrive",
            )
            assert post(on.url, ask(prompt), X_Request_Id="ids").status == 200
            assert post(on.url, ask("words " * 40), X_Request_Id="text").status == 200
            on.end("text")
            ids, text = on.lines("decision")
            cached = [one["cached_tokens"] for one in ids["snapshot"]["candidates"]]
            assert (ids["cache"], ids["instance"], cached) == ("exact", "b", [0, 36])
            assert (text["cache"], text["form"]) == ("mirror", "text")
            cache = on.instances()["b"]["cache"]
            assert cache["mirror_minus_exact_tokens"] == -40
            assert (cache["mean_difference_tokens"], cache["compared_prompts"]) == (
                36,
                1,
            )
            assert cache["complete"]
            publisher.publish(type="AllBlocksCleared")
            until(
                lambda: (
                    b'kvtax_proxy_cache_exact_tokens{instance="b"} 0.0'
                    in on.get("/metrics").body
                ),
                "the reset did not arrive",
            )


def test_a_kvindexd_that_ends_costs_no_request(tmp_path: Path) -> None:
    with two(tmp_path) as (instances, _):
        file = tmp_path / "instances.json"
        write_instances(file, instances)
        gone = kvindexd(file, tmp_path / "kvindexd.log")
        address = gone.__enter__()
        with proxy(tmp_path, instances, "lmetric", "--kvindexd", address) as on:
            assert post(on.url, ask(), X_Request_Id="before").status == 200
            gone.__exit__(None, None, None)
            assert post(on.url, ask(), X_Request_Id="after").status == 200
            on.end("after")
            assert [line["cache"] for line in on.lines("decision")] == [
                "exact",
                "mirror",
            ]
            assert b"kvtax_proxy_unanswered_total 1.0" in on.get("/metrics").body


def test_every_worker_knows_what_is_cached_and_where_a_session_is(
    tmp_path: Path,
) -> None:
    prompt = list(range(40))
    with two(tmp_path) as (instances, publisher), ExitStack() as clients:
        publisher.store(prompt)
        file = tmp_path / "instances.json"
        write_instances(file, instances)
        address = clients.enter_context(kvindexd(file, tmp_path / "kvindexd.log"))
        options = "--kvindexd", address, "--workers", "2"
        on = clients.enter_context(proxy(tmp_path, instances, "linear", *options))
        until(
            lambda: on.instances()["b"]["cache"]["exact_tokens"] == 40,
            "the events of before did not arrive",
        )
        assert post(on.url, ask([1, 2]), X_Session_Id="at a").status == 200
        assert post(on.url, ask(prompt), X_Session_Id="at b").status == 200
        # At once, so that both workers have to do with them.
        turns = [
            clients.enter_context(connect(on.url, ask(prompt), X_Session_Id=session))
            for session in ["at a", "at b"] * 20
        ]
        for client in turns:
            first_event(client)
        lines = map(json.loads, on.get("/decisions").body.splitlines())
        went = {(one["session"][-1], one["instance"], one["cache"]) for one in lines}
        assert went == {("a", "a", "exact"), ("b", "b", "exact")}
        logs = list(tmp_path.glob("*.decisions.*.jsonl"))
        until(
            lambda: all(b'"decision"' in log.read_bytes() for log in logs),
            "only one worker has decided",
        )
