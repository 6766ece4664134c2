# SPDX-License-Identifier: Apache-2.0
"""Two stand-ins that speak the connectors' side of a transfer, and heavy prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proxy_lab import Proxy, ask

from fleet.standin.process import Standin, standin
from lab.records.instances import Instance

# A prompt of HEAVY tokens takes 0.2 s to prefill.
SLOW = ("--prefill-us-per-token", "1000", "--decode-us", "1000")
HEAVY = list(range(200))
HEAVY_FROM = ("--parameters", "warm_tokens=50", "heavy_tokens=100")
EXTERNAL = "vllm:prompt_tokens_by_source_total{external_kv_transfer}"
RUNNING = "vllm:num_requests_running"
COMPUTED = "vllm:prompt_tokens_by_source_total{local_compute}"


@contextmanager
def slow_pair() -> Iterator[list[Standin]]:
    with standin(*SLOW) as a, standin(*SLOW) as b:
        yield [a, b]


def named(
    standins: list[Standin], connector: str = "mooncake", roles: tuple = ("both",) * 2
) -> list[Instance]:
    return [
        Instance(name, one.url, role, connector, bootstrap_url=one.url)
        for name, one, role in zip("ab", standins, roles, strict=True)
    ]


def unlike(number: int) -> list[int]:
    """A heavy prompt that no other test has."""
    return [number, *HEAVY]


def heavy_chat(prompt: list[int], **fields: object) -> dict:
    """The same as a chat: one turn, of these numbers."""
    asked = ask(**fields)
    del asked["prompt"]
    content = " ".join(f"number {token}" for token in prompt)
    return asked | {"messages": [{"role": "user", "content": content}]}


def went_to(on: Proxy, id_: str) -> tuple[str, str]:
    """The decode and the prefill instance that were decided on."""
    decision = next(one for one in on.lines("decision") if one["id"] == id_)
    return decision["instance"], decision["prefill_instance"]
