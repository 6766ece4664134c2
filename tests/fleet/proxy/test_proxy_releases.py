# SPDX-License-Identifier: Apache-2.0
"""KV events are read as every release of vLLM publishes them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from publisher import BLOCK, Publisher, cached, run, stored, subscribed

from fleet.proxy.exact import Exact
from fleet.proxy.kv_events import read_batch
from kvindex.cmd.kvindexd.events import messages

MESSAGES = json.loads(messages.FILE.read_text())
CASES = [
    pytest.param(message, id=f"{release}: {message['name']}")
    for release, all_of_it in MESSAGES.items()
    for message in all_of_it
]


def plain(event: Any) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return {"type": type(event).__struct_config__.tag, **messages.for_json(fields)}


@pytest.mark.parametrize("message", CASES)
def test_a_batch_says_what_the_release_meant(message: dict[str, Any]) -> None:
    batch = read_batch(bytes.fromhex(message["payload"]))
    assert batch.ts == 1.5
    assert len(batch.events) == len(message["events"])
    for found, meant in zip(map(plain, batch.events), message["events"], strict=True):
        assert found["type"] == meant["type"]
        shared = found.keys() & meant.keys()
        assert {name: found[name] for name in shared} == {
            name: meant[name] for name in shared
        }
        missing = found.keys() - meant.keys()
        assert all(found[name] is None for name in missing)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.5, [["Unknown"]]]),
        msgspec.msgpack.encode([1.5, [{"type": "Unknown"}]]),
        msgspec.msgpack.encode([1.5, [{}]]),
        msgspec.msgpack.encode([1.5, [[]]]),
        msgspec.msgpack.encode([1.5, [7]]),
        msgspec.msgpack.encode([1.5, [{"type": "BlockStored"}]]),
    ],
)
def test_what_is_no_batch_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_batch(payload)


def test_the_committed_messages_are_those_of_the_releases() -> None:
    paths = messages.releases()
    if missing := MESSAGES.keys() - paths.keys():
        pytest.skip(f"no sources of {', '.join(missing)}: run make vllm-releases")
    assert messages.document() == messages.FILE.read_text()


@pytest.mark.parametrize("topic", [[], [b"topic"]], ids=["to 0.25.1", "from 0.28.0"])
def test_a_replay_is_understood_with_a_topic_and_without(tmp_path, topic) -> None:
    async def scenario(publisher: Publisher, exact: Exact) -> None:
        publisher.topic = topic
        await publisher.publish(stored(1))
        ends = publisher.endpoint, publisher.replay_endpoint
        async with subscribed(exact, *ends) as (subscriber, until):
            await until(lambda: exact.tokens == [BLOCK])
            assert cached(exact, 1)
            assert subscriber.complete

    run(scenario, tmp_path)
