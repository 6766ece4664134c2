# SPDX-License-Identifier: Apache-2.0
"""The proxy's parts on their own: prefix state, counters, settings."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.proxy.apis import APIS, COMPLETIONS
from fleet.proxy.exact import AllBlocksCleared, BlockRemoved, BlockStored, Exact
from fleet.proxy.loads import FleetLoad, InstanceLoad
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


def _fly(
    loads: FleetLoad, script: list[tuple[str, int]], seen: list[InstanceLoad]
) -> None:
    with loads.flight("a", 100) as flight:
        flight.prefills(60)
        for place, (step, number) in enumerate(script):
            rest = script[place + 1 :]
            if step == "first":
                flight.first_token()
                assert seen[0].pending_prefill_tokens >= 0
            elif step == "tokens":
                flight.generated(number)
            elif step == "offload":
                with loads.offload("b", number, number // 2):
                    assert loads.offloads > 0
                    _fly(loads, rest, seen)
                return
            elif step == "nested":
                _fly(loads, rest, seen)
                return
            else:
                raise _Boom


@given(st.lists(steps, max_size=4))
def test_counters_are_back_at_zero_however_requests_end(scripts) -> None:
    loads = FleetLoad(["a", "b"])
    for script in scripts:
        with suppress(_Boom):
            _fly(loads, script, [loads["a"], loads["b"]])
        for name in "ab":
            load = loads[name]
            assert load.requests == load.ongoing_tokens == 0
            assert load.pending_prefill_tokens == 0
        assert loads.offloads == 0


BLOCK = 4


class Engine:
    """A prefix cache that says what happens in it, as vLLM's block pool does."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.held: dict[tuple, int] = {}  # the prefix, and how many blocks have it

    def store(self, tokens: list[int], cached: int) -> list:
        """Cache the blocks of a prompt from number `cached` on."""
        chains = [tuple(tokens[: n + BLOCK]) for n in range(0, len(tokens) - 3, BLOCK)]
        if cached >= len(chains):
            return []
        for chain in chains[cached:]:
            self.held[chain] = self.held.get(chain, 0) + 1
        parent = self.hash(chains[cached - 1]) if cached else None
        ids = tokens[cached * BLOCK : len(chains) * BLOCK]
        hashes = [self.hash(chain) for chain in chains[cached:]]
        return [BlockStored(hashes, parent, ids, BLOCK)]

    def evict(self, choice: int) -> list:
        if not self.held:
            return []
        chain = sorted(self.held)[choice % len(self.held)]
        self.held[chain] -= 1
        if not self.held[chain]:
            del self.held[chain]
        return [BlockRemoved([self.hash(chain)])]

    def cached(self, tokens: list[int]) -> int:
        """Tokens of the prompt that vLLM would find, all but the last at most."""
        end = 0
        while end + BLOCK < len(tokens) and tuple(tokens[: end + BLOCK]) in self.held:
            end += BLOCK
        return end

    def hash(self, chain: tuple) -> int:
        return hash((self.salt, chain))


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
events = st.one_of(
    st.tuples(st.just("store"), tokens),
    st.tuples(st.just("evict"), st.integers(0, 99)),
    st.tuples(st.just("reset"), st.none()),
)


@given(
    st.lists(st.tuples(st.integers(0, 1), events), max_size=25),
    st.lists(tokens, max_size=5),
)
def test_exact_state_is_what_the_engines_have(history, asked) -> None:
    engines, exact = [Engine(1), Engine(2)], Exact(2)
    for instance, (what, argument) in history:
        engine = engines[instance]
        if what == "store":
            # A prompt at once with another like it finds nothing cached.
            reused = engine.cached(argument) // BLOCK if len(argument) % 3 else 0
            made = engine.store(argument, reused)
        elif what == "evict":
            made = engine.evict(argument)
        else:
            engine.held.clear()
            made = [AllBlocksCleared()]
        exact.apply(instance, made)
        assert exact.tokens[instance] == len(engine.held) * BLOCK
    for prompt in asked:
        for comma in (", ", ",", ",\n"):
            text = json.dumps(prompt, separators=(comma, ":"))
            found = exact.cached_tokens(text.encode(), "m")
            assert found == [engine.cached(prompt) for engine in engines]
    assert exact.skipped == [0, 0]


def test_a_block_is_there_until_the_last_of_its_hash_is_removed() -> None:
    exact = Exact(1)
    twice = BlockStored([1], None, [5] * BLOCK, BLOCK)
    prompt = json.dumps([5] * BLOCK + [0]).encode()
    exact.apply(0, [twice, twice, BlockRemoved([1])])
    assert exact.cached_tokens(prompt, "m") == [BLOCK]
    exact.apply(0, [BlockRemoved([1])])
    assert exact.cached_tokens(prompt, "m") == exact.tokens == [0]


def test_blocks_of_a_lora_count_for_its_name_only() -> None:
    exact = Exact(1)
    ids, hashes = list(range(8)), [11, 12]
    extra = [("adapter",), ("adapter",)]
    stored = BlockStored(hashes, None, ids, 4, 1, "GPU", "adapter", extra)
    exact.apply(0, [stored])
    prompt = json.dumps([*ids, 99]).encode()
    assert exact.cached_tokens(prompt, "adapter") == [8]
    assert exact.cached_tokens(prompt, "base") == [0]


@pytest.mark.parametrize(
    "stored",
    [
        BlockStored([1], None, [1, 2, 3, 4], 4, extra_keys=[("salt",)]),
        BlockStored([1], 77, [1, 2, 3, 4], 4),
        BlockStored([1], None, [1, 2, 3, 4, 5, 6, 7, 8], 4),
    ],
    ids=["salted", "parent unknown", "blocks left out"],
)
def test_blocks_that_tokens_do_not_tell_are_skipped_and_counted(stored) -> None:
    exact = Exact(1)
    exact.apply(0, [stored, BlockRemoved([1])])
    assert exact.tokens == [0]
    assert exact.skipped == [1]


MOONCAKE = {"connector": "mooncake", "bootstrap_url": "http://h:1"}


@pytest.mark.parametrize(
    ("policy", "cache", "fields", "said"),
    [
        ("linear", "exact", {}, "kv_events"),
        ("direct_read", "mirror", {}, "direct_read"),
        ("elastic", "mirror", {}, "all need the connector"),
        ("elastic", "mirror", {"connector": "mooncake"}, "bootstrap_url"),
        ("pd_sep", "mirror", MOONCAKE, "role prefill and of role decode"),
        ("linear", "mirror", {}, None),
        ("linear", "exact", {"kv_events": "tcp://h:1"}, None),
        ("direct_read", "mirror", {"direct_read": Address("h", 1)}, None),
        ("elastic", "mirror", MOONCAKE, None),
        ("elastic", "mirror", {"connector": "nixl"}, None),
    ],
)
def test_instances_that_cannot_do_what_is_asked_are_refused(
    policy: str, cache: str, fields: dict, said: str | None
) -> None:
    instances = [Instance("a", "http://h:2", **fields)]
    settings = Settings(policy, cache=cache)
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
