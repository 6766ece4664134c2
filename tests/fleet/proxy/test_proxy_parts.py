# SPDX-License-Identifier: Apache-2.0
"""The proxy's parts on their own: prefix state, counters, settings."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.proxy.apis import APIS, COMPLETIONS
from fleet.proxy.loads import FleetLoad
from fleet.proxy.mirror import Mirror
from fleet.proxy.prefix_index import PrefixIndex
from fleet.proxy.relay import _stream
from fleet.proxy.settings import Settings, SettingsError, check
from lab.records.decisions import DecisionEnd
from lab.records.instances import Address, Instance

keys = st.integers(0, 6)


@given(
    st.lists(st.tuples(st.booleans(), keys, st.integers(0, 3)), max_size=40),
    st.lists(keys, max_size=6),
)
def test_depths_are_the_leading_keys_that_each_instance_holds(changes, asked) -> None:
    index, held = PrefixIndex(4), [set() for _ in range(4)]
    for add, key, instance in changes:
        (index.add if add else index.discard)(key, instance)
        (held[instance].add if add else held[instance].discard)(key)
    expected = []
    for has in held:
        missing = (n for n, key in enumerate(asked) if key not in has)
        expected.append(next(missing, len(asked)))
    assert index.depths(asked) == expected
    assert len(index) == len(set().union(*held))


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(keys, unique=True)), max_size=30))
def test_the_mirror_is_an_lru_bounded_in_tokens(routed) -> None:
    mirror, model = Mirror(2, 5), [OrderedDict(), OrderedDict()]
    for instance, chain in routed:
        mirror.add(instance, chain, 1.0)
        for key in reversed(chain):
            model[instance].pop(key, None)
            model[instance][key] = True
        while len(model[instance]) > 5:
            model[instance].popitem(last=False)
        for key in range(7):
            depths = mirror.depths([key])
            assert depths == [int(key in has) for has in model]
        assert mirror.tokens == [len(has) for has in model]
    mirror.clear(0)
    assert mirror.tokens[0] == 0
    assert all(mirror.depths([key])[0] == 0 for key in range(7))


def test_the_mirror_forgets_a_prompt_from_its_end() -> None:
    mirror = Mirror(1, 6)
    mirror.add(0, [1, 2, 3, 4], 1.0)
    mirror.add(0, [7, 8, 9, 10], 1.0)
    assert mirror.depths([1, 2, 3, 4]) == [2]
    assert mirror.depths([7, 8, 9, 10]) == [4]


class _Boom(Exception):
    pass


steps = st.lists(
    st.tuples(
        st.sampled_from(["first", "tokens", "offload", "nested", "boom"]),
        st.integers(0, 1000),
    ),
    max_size=12,
)


def _fly(loads: FleetLoad, script: list[tuple[str, int]]) -> None:
    with loads.flight("a", 100) as flight:
        flight.prefills(60)
        for place, (step, number) in enumerate(script):
            rest = script[place + 1 :]
            if step == "first":
                flight.first_token()
                assert loads["a"].pending_prefill_tokens >= 0
            elif step == "tokens":
                flight.generated(number)
            elif step == "offload":
                with loads.offload("b", number, number // 2):
                    assert loads.offloads > 0
                    _fly(loads, rest)
                return
            elif step == "nested":
                _fly(loads, rest)
                return
            else:
                raise _Boom


@given(st.lists(steps, max_size=4))
def test_counters_are_back_at_zero_however_requests_end(scripts) -> None:
    loads = FleetLoad(["a", "b"])
    for script in scripts:
        with suppress(_Boom):
            _fly(loads, script)
        for name in "ab":
            load = loads[name]
            assert load.requests == load.ongoing_tokens == 0
            assert load.pending_prefill_tokens == 0
        assert loads.offloads == 0


MOONCAKE = {"connector": "mooncake", "bootstrap_url": "http://h:1"}


@pytest.mark.parametrize(
    ("policy", "fields", "said"),
    [
        ("direct_read", {}, "direct_read"),
        ("elastic", {}, "all need the connector"),
        ("elastic", {"connector": "mooncake"}, "bootstrap_url"),
        ("pd_sep", MOONCAKE, "role prefill and of role decode"),
        ("linear", {}, None),
        ("direct_read", {"direct_read": Address("h", 1)}, None),
        ("elastic", MOONCAKE, None),
        ("elastic", {"connector": "nixl"}, None),
    ],
)
def test_instances_that_cannot_do_what_is_asked_are_refused(
    policy: str, fields: dict, said: str | None
) -> None:
    instances = [Instance("a", "http://h:2", **fields)]
    settings = Settings(policy)
    if said is None:
        check(instances, settings)
        return
    with pytest.raises(SettingsError, match=said):
        check(instances, settings)


class Cut:
    """An answer that comes in these pieces."""

    at_end = False

    def __init__(self, pieces: list[bytes]) -> None:
        self.first, *rest = pieces
        self._rest = iter(rest)

    async def chunk(self) -> bytes:
        return next(self._rest, b"")


class Client:
    path = COMPLETIONS

    async def write(self, chunk: bytes) -> None:
        pass


@pytest.mark.parametrize("cut", range(1, len(APIS[COMPLETIONS].errors[0]) + 1))
def test_an_error_event_is_one_however_tcp_cuts_it(cut: int) -> None:
    """A [DONE] after the error does not make the answer a good one."""
    token = b'data: {"choices": [{"text": "a"}]}\n\n'
    event = b'data: {"error": {"message": "engine died"}}\n\n'
    pieces = [token + event[:cut], event[cut:] + b"data: [DONE]\n\n"]
    end = DecisionEnd("r", 0, None, instance="a")
    with FleetLoad(["a"]).flight("a", 1) as flight:
        exchange = SimpleNamespace(end=end, flight=flight)
        asyncio.run(_stream(Client(), Cut(pieces), exchange))
    assert (end.status, end.error) == ("failed", "a sent an error event")
