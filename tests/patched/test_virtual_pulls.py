# SPDX-License-Identifier: Apache-2.0
"""KV moves between virtual engines as NIXL moves it, over links that take time."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import pytest
from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.records.host_times import RequestTimes
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.simulate.transfers import Links, NixlTransfers
from kvtax_fleet.simulate.virtual_instance import VirtualInstance, VirtualRequest
from virtual_lab import (
    BLOCK_NS,
    FORWARD_NS,
    LATENCY_NS,
    LINK,
    LOOK_NS,
    run_virtually,
    virtual_engine,
)
from vllm import envs

PATCHES = ["step_timing_v2"]
ONLY = "0.18.1"

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PROMPT = list(range(1, 1_601))
BLOCKS = 100


class Pair:
    """The instances `p`, which prefills, and `d`, which reads from it."""

    def __init__(
        self, model, overlapping: bool, rests: bool = True, host_us: float = 0.0
    ) -> None:
        self.loop = asyncio.get_running_loop()
        pulls = NixlTransfers(Links(LINK, 16))
        self.served, self.steps = {}, {}
        for name in "pd":
            moves = partial(pulls.step, name)
            engine = virtual_engine(
                model, 700, overlapping, moves, connector=NIXL, base_us=host_us
            )
            pulls.join(Instance(name, f"http://{name}"), engine)
            announce = partial(pulls.announce, name) if rests else None
            instance = VirtualInstance(engine, self.loop, RequestTimes(), announce)
            self.served[name] = instance
            self.steps[name] = 0
            engine.step = partial(self._counted, name, engine.step)

    def _counted(self, name, step):
        self.steps[name] += 1
        return step()

    async def prefilled(self) -> dict:
        """Where P holds the prompt's KV, in its own words."""
        asked = VirtualRequest(PROMPT, 1, False, {"do_remote_decode": True})
        answer = self.served["p"].request(asked)
        await answer.begin()
        return msgspec.json.decode(answer.first)["kv_transfer_params"]

    async def decoded(self, params: dict | None) -> int:
        """Have D answer; how long its first token took, in ns."""
        begun_ns = self.loop.now_ns()
        answer = self.served["d"].request(
            VirtualRequest(PROMPT, 1, kv_transfer_params=params)
        )
        await answer.begin()
        return self.loop.now_ns() - begun_ns

    async def used_blocks(self) -> list[float]:
        """Of both, after a step of each."""
        for one in self.served.values():
            await one.request(VirtualRequest([5], 1)).begin()
        return [one.engine.gauges.usage for one in self.served.values()]


def run(what, model, overlapping: bool = False, **how) -> None:
    async def whole() -> None:
        await what(Pair(model, overlapping, **how))

    run_virtually(whole())


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_prompt_prefilled_elsewhere_is_read_and_both_engines_free_it(
    model, overlapping
):
    async def read(pair: Pair) -> None:
        params = await pair.prefilled()
        assert pair.served["p"].engine.gauges.usage > 0
        took_ns = await pair.decoded(params)
        assert pair.served["d"].totals.external_tokens == len(PROMPT)
        least_ns = BLOCKS * BLOCK_NS + LATENCY_NS + FORWARD_NS
        assert least_ns <= took_ns <= least_ns + 2 * LOOK_NS + FORWARD_NS
        assert await pair.used_blocks() == [0, 0]

    run(read, model, overlapping)


def test_what_is_cached_already_is_not_read_and_the_holder_frees_it(model):
    async def cached(pair: Pair) -> None:
        await pair.decoded(None)
        params = await pair.prefilled()
        # All but the block of the last token.
        assert await pair.decoded(params) < FORWARD_NS + 5 * BLOCK_NS + 2 * LOOK_NS
        assert await pair.used_blocks() == [0, 0]

    run(cached, model)


def test_kv_that_nobody_reads_is_held_as_long_as_nixl_holds_it(model):
    async def held(pair: Pair) -> None:
        await pair.prefilled()
        limit_s = envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT
        await asyncio.sleep(limit_s - 2)
        assert (await pair.used_blocks())[0] > 0
        await asyncio.sleep(2)
        assert await pair.used_blocks() == [0, 0]

    run(held, model)


@pytest.mark.parametrize("host_us", [0.0, 300.0])
@pytest.mark.parametrize("overlapping", [False, True])
def test_steps_that_change_nothing_are_left_out_and_nothing_else_changes(
    model, overlapping, host_us, monkeypatch
):
    """A request comes, and one is aborted, while the engine waits for a slow read."""
    monkeypatch.setitem(globals(), "LINK", Transfer(1, 16 * 8 / 1e6, latency_us=5))
    ended: dict[bool, list] = {}
    steps: dict[bool, int] = {}

    async def waits(rests: bool, pair: Pair) -> None:
        params = await pair.prefilled()
        d = pair.served["d"]
        reads = asyncio.create_task(pair.decoded(params))
        await asyncio.sleep(0.0203)
        other = d.request(VirtualRequest([7] * 50, 3))
        given_up = d.request(VirtualRequest([9] * 50, 500))
        await other.begin()
        other_ns = pair.loop.now_ns()
        given_up.close()
        times = [await reads, other_ns, pair.loop.now_ns()]
        ended[rests] = [*times, await pair.used_blocks(), pair.loop.now_ns()]
        steps[rests] = pair.steps["d"]

    for rests in (False, True):
        run(partial(waits, rests), model, overlapping, rests=rests, host_us=host_us)
    assert ended[True] == ended[False]
    assert steps[True] < steps[False]
