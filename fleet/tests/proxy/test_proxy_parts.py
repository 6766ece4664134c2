# SPDX-License-Identifier: Apache-2.0
"""Parts of the proxy by themselves: counters, mirror, shared state, settings, log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtax.cli import main
from kvtax.records import files
from kvtax.records.files import read_lines

from kvtax_fleet.proxy.decision_log import DecisionLog
from kvtax_fleet.proxy.loads import FleetLoad
from kvtax_fleet.proxy.router import Mirror, PrefixIndex
from kvtax_fleet.proxy.settings import Settings, SettingsError, check
from kvtax_fleet.records.decisions import DecisionEnd, DecisionsHeader
from kvtax_fleet.records.instances import Instance

keys = st.integers(0, 6)


@given(
    st.lists(st.tuples(st.booleans(), keys, st.integers(0, 3)), max_size=40),
    st.lists(keys, max_size=6),
)
def test_depths_are_the_leading_keys_that_each_instance_holds(changes, asked):
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
def test_the_mirror_is_an_lru_bounded_in_tokens(routed):
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
def test_counters_are_back_at_zero_however_requests_end(scripts):
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
    ("settings", "fields", "reason"),
    [
        (Settings("elastic"), {}, "all need the connector"),
        (Settings("elastic"), {"connector": "mooncake"}, "bootstrap_url"),
        (Settings("pd_sep"), MOONCAKE, "role prefill and of role decode"),
        (Settings("linear"), {}, None),
        (Settings("elastic"), MOONCAKE, None),
        (Settings("elastic"), {"connector": "nixl"}, None),
    ],
)
def test_instances_that_cannot_do_it_are_refused(settings, fields, reason):
    instances = [Instance("a", "http://h:2", **fields)]
    refusal = pytest.raises(SettingsError, match=reason) if reason else nullcontext()
    with refusal:
        check(instances, settings)


def test_each_setting_with_a_description_is_an_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["proxy", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--silence-timeout-s" in printed
    assert "--mirror-tokens" not in printed


HEADER = DecisionsHeader(policy="linear")


def ended(path: Path) -> list[str]:
    return [end.id for end in read_lines(path, DecisionsHeader, DecisionEnd).records]


async def flushing(log: DecisionLog, use: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(log.flush_forever())
    await use()
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_lines_are_lost_while_the_disk_is_full_and_that_is_logged_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(files, "FLUSH_EVERY_S", 0.01)
    write, full, tried = files._write_all, False, 0

    def write_if_room(file, data: bytes) -> None:
        nonlocal tried
        try:
            write(file, data[: len(data) // 2] if full else data)
            if full and data:
                raise OSError(28, "No space left on device")
        finally:
            tried += bool(data)

    monkeypatch.setattr(files, "_write_all", write_if_room)
    path = tmp_path / "decisions.jsonl"
    with caplog.at_level(logging.ERROR), DecisionLog(path, HEADER) as log:

        async def use() -> None:
            nonlocal full
            for number, full_now in enumerate([False, True, True, False]):
                full, before = full_now, tried
                log.ended(DecisionEnd(str(number), number, None, status="ok"))
                while tried == before:
                    await asyncio.sleep(0.01)

        asyncio.run(flushing(log, use))
    assert ended(path) == ["0", "3"]
    assert [record.message for record in caplog.records] == [
        f"{path}: lines are lost: [Errno 28] No space left on device"
    ]


def test_what_was_not_flushed_yet_is_written_at_the_end(tmp_path):
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path, HEADER) as log:
        log.ended(DecisionEnd("a", 0, None, status="ok"))
    assert ended(path) == ["a"]
