# SPDX-License-Identifier: Apache-2.0
"""KV moves between virtual engines as Mooncake and NIXL move it, over slow links."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.records.host_times import RequestTimes
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.simulate.transfers import Links, MooncakeTransfers, NixlTransfers
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
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

PATCHES = ["step_timing_v2"]
# Virtual time reads its arguments as this release does.
ONLY = "0.18.1"

SEEDS = [1, 2, 3, 4, 5]
BLOCK_TOKENS = 16
END_NS = 10**9


def metadata(send=(), pull=(), dropped=()) -> SimpleNamespace:
    """A MooncakeConnectorMetadata: `send` and `pull` are (transfer id, blocks)."""
    pulls = {
        f"d{each}": SimpleNamespace(transfer_id=each, local_block_ids=[0] * blocks)
        for each, blocks in pull
    }
    return SimpleNamespace(
        reqs_to_send={f"p{each}": (each, [0] * blocks) for each, blocks in send},
        reqs_to_recv={"engine": pulls},
        reqs_not_processed=set(dropped),
    )


def reported(
    transfers: MooncakeTransfers, engine: str, now_ns: int
) -> tuple[list, list]:
    results = transfers.step(engine, metadata(), now_ns)
    return (results.finished_sending, results.finished_recving) if results else ([], [])


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency():
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    transfers.step("p", metadata(send=[("a", 300)]), 1_000)
    transfers.step("d", metadata(pull=[("a", 200)]), 9_000)
    end_ns = 9_000 + 200 * BLOCK_NS + LATENCY_NS
    for engine, sides in (("p", (["pa"], [])), ("d", ([], ["da"]))):
        assert reported(transfers, engine, end_ns - 1) == ([], [])
        assert reported(transfers, engine, end_ns) == sides
        assert reported(transfers, engine, END_NS) == ([], [])


def test_nothing_moves_before_the_prefill_has_ended():
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    transfers.step("d", metadata(pull=[("a", 10)]), 0)
    transfers.step("p", metadata(send=[("a", 0)]), 0)
    assert reported(transfers, "d", END_NS) == ([], [])
    transfers.step("p", metadata(send=[("a", 10)]), END_NS)
    assert reported(transfers, "d", 2 * END_NS) == ([], ["da"])


@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_are_sent_as_soon_as_they_and_the_links_are_ready(seed):
    """Piece by piece, in place of the formula."""
    rng = random.Random(seed)
    for _ in range(200):
        pieces, before, blocks = rng.randrange(1, 60), rng.randrange(99), 60_000
        took_ns = rng.choice([1_000, 60_000, 600_000, 60_000_000]) * pieces
        times = Transfer(1, blocks * BLOCK_TOKENS * 8 / took_ns, pieces=pieces)
        begun_ns, interval_ns = rng.randrange(10**6), rng.randrange(10**6)
        links = Links(times, BLOCK_TOKENS)
        gone_ns = before and links.carry("p", "x", before, 0)
        for piece in range(1, pieces + 1):
            gone_ns = max(gone_ns, begun_ns + piece * interval_ns) + took_ns // pieces
        ready_ns = begun_ns + pieces * interval_ns
        arrived_ns = links.carry("p", "d", blocks, ready_ns, begun_ns)
        assert arrived_ns == pytest.approx(gone_ns, abs=2)
        assert links.carry("p", "x", 0, 0) == arrived_ns


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_serves_one_transfer_at_a_time_and_everybody_is_told_once(seed):
    rng = random.Random(seed)
    moves = [(*rng.sample("xyz", 2), rng.randrange(1, 50)) for _ in range(12)]
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    for number, (source, target, blocks) in enumerate(moves):
        transfers.step(source, metadata(send=[(str(number), blocks)]), number)
        transfers.step(target, metadata(pull=[(str(number), blocks)]), number)
    ended_ns = {}
    for now_ns in range(0, 600 * BLOCK_NS + 2 * LATENCY_NS, BLOCK_NS // 2):
        for engine in "xyz":
            for names in reported(transfers, engine, now_ns):
                for name in names:
                    assert name not in ended_ns
                    ended_ns[name] = now_ns
    assert len(ended_ns) == 2 * len(moves)
    for link in (0, 1):
        for engine in "xyz":
            own = [
                (ended_ns[f"d{number}"], move[2])
                for number, move in enumerate(moves)
                if move[link] == engine
            ]
            for (one_ns, _), (other_ns, blocks) in pairwise(own):
                assert other_ns >= one_ns + (blocks - 1) * BLOCK_NS


def test_a_prefill_that_is_given_up_keeps_nobody_waiting():
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    transfers.step("d", metadata(pull=[("a", 10)]), 0)
    transfers.step("p", metadata(dropped=["a", "b"]), 7)
    assert reported(transfers, "d", 7) == ([], ["da"])
    late = transfers.step("d", metadata(pull=[("b", 10)]), 9)
    assert late.finished_recving == ["db"]


def test_kv_that_nobody_pulls_is_held_as_long_as_mooncake_holds_it():
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    transfers.step("p", metadata(send=[("a", 10)]), 0)
    assert reported(transfers, "p", 480 * 10**9) == ([], [])
    assert reported(transfers, "p", 480 * 10**9 + 1) == (["pa"], [])


def test_what_is_sent_while_it_is_computed_is_there_sooner():
    """From the prefill's beginning on, if the pull is there; else from the pull on."""
    layers = Transfer(1, LINK.gbit_s, LATENCY_NS / 1e3, pieces=4)
    for pulled_ns, end_ns in (
        (0, 1_000_000 + 5 * BLOCK_NS),
        (1_000_000, 1_000_000 + 20 * BLOCK_NS),
    ):
        transfers = MooncakeTransfers(Links(layers, BLOCK_TOKENS))
        transfers.step("p", metadata(send=[("a", 0)]), 0)
        moves = [("d", metadata(pull=[("a", 20)]), pulled_ns)]
        moves.append(("p", metadata(send=[("a", 20)]), 1_000_000))
        for engine, metadata_, now_ns in moves:
            transfers.step(engine, metadata_, now_ns)
        end_ns += LATENCY_NS
        assert reported(transfers, "d", end_ns - 1) == ([], [])
        assert reported(transfers, "d", end_ns) == ([], ["da"])


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_prompt_prefilled_elsewhere_is_pulled_and_both_engines_free_it(
    model, overlapping
):
    transfers = MooncakeTransfers(Links(LINK, BLOCK_TOKENS))
    p, d = (
        virtual_engine(model, 700, overlapping, partial(transfers.step, name))
        for name in "pd"
    )
    prompt, params = list(range(1, 1_601)), {"transfer_id": "a"}
    p.add("p", prompt, 1, params | {"do_remote_decode": True})
    pull = {"remote_engine_id": "p", "remote_bootstrap_addr": "http://p"}
    d.add("d", prompt, 5, params | pull | {"do_remote_prefill": True})
    external, ended_ns = 0, []
    while p.has_work or d.has_work:
        engine = min(
            (engine_ for engine_ in (p, d) if engine_.has_work),
            key=lambda e: e.clock.now_ns,
        )
        for output in outputs.outputs if (outputs := engine.step()) else []:
            if output.request_id == "d":
                external = max(external, output.num_external_computed_tokens)
                ended_ns.append(engine.clock.now_ns)
    assert external == len(prompt)
    assert len(ended_ns) == 5
    # P's forward, the transfer, and D's forward for the first token at least.
    least_ns = 2 * FORWARD_NS + 100 * BLOCK_NS + LATENCY_NS
    assert least_ns <= ended_ns[0] <= least_ns + 2 * FORWARD_NS + 2_000_000
    # What P has sent, it frees with its next step.
    p.add("next", [5], 1, None)
    while p.has_work:
        p.step()
    assert [engine_.core.scheduler.kv_cache_manager.usage for engine_ in (p, d)] == [
        0,
        0,
    ]


def test_the_pool_bounds_hand_offs_in_flight_and_a_full_batch_begins_none(model):
    """Of aiconfigurator #1380's floor(pool / sequence) - max_num_seqs, at a decoder."""
    may_run, whole_pool = 8, 40
    arrived: list[str] = []

    def moves(metadata, now_ns):
        received, arrived[:] = list(arrived), []
        return KVConnectorOutput(finished_recving=received) if received else None

    engine = virtual_engine(model, 401, False, moves, max_requests=may_run)

    def in_flight() -> list[str]:
        """Requests whose blocks are held for KV that has not come."""
        scheduler = engine.scheduler
        return [
            name
            for name, request in scheduler.requests.items()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and name not in scheduler.finished_recving_kv_req_ids
            and scheduler.kv_cache_manager.get_block_ids(name)[0]
        ]

    for number in range(2 * whole_pool):
        params = {
            "do_remote_prefill": True,
            "transfer_id": f"t{number}",
            "remote_engine_id": "p",
            "remote_bootstrap_addr": "http://127.0.0.1:9",
        }
        # Ten blocks, and no two prompts alike.
        engine.add(str(number), [number + 1] * 159, 64, params)
    engine.step()
    assert len(in_flight()) == whole_pool, "more than the formula, while nothing runs"

    arrived += in_flight()[:may_run]
    engine.step()
    engine.step()
    assert len(engine.scheduler.running) == may_run
    assert len(in_flight()) == whole_pool - may_run, "the formula, with a full batch"

    # Blocks that KV may still come to are freed when it has come.
    arrived += in_flight()
    for name in in_flight()[: whole_pool // 2]:
        engine.abort(name)
    for _ in range(3):
        engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free >= 100
    assert len(engine.scheduler.running) == may_run
    assert not in_flight(), "none begins beside a full batch, though there is room"


# NIXL.

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PROMPT = list(range(1, 1_601))


class Pair:
    """The instances `p`, which prefills, and `d`, which reads from it."""

    def __init__(
        self, model, overlapping: bool, rests: bool = True, host_us: float = 0.0
    ) -> None:
        self.loop = asyncio.get_running_loop()
        pulls = NixlTransfers(Links(LINK, BLOCK_TOKENS))
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
        for instance in self.served.values():
            await instance.request(VirtualRequest([5], 1)).begin()
        return [instance.engine.gauges.usage for instance in self.served.values()]


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
        least_ns = 100 * BLOCK_NS + LATENCY_NS + FORWARD_NS
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
