# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a Mooncake transfer that fails, on patched and unpatched code.

A scenario returns the problems of the engine afterwards, in words. The abort-race patch
promises that there are none: the engine is alive, every request has ended, every block
is back. Scenarios without a decoder hold on every release.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import vllm
import zmq
from mooncake_tables import FAILING, SCENARIOS
from mooncake_world import (
    LONG_TIMEOUT_S,
    PATIENCE_S,
    Code,
    MooncakeEngine,
    World,
    reports_failed_pulls,
    set_timeout,
)
from variants import CONNECTOR, SCHEDULER, block_ids, load, patch, patched_source

from kvtax.engine.engine_process import serve

# Until the blocks of a prefill come back that no decoder could use.
SHORT_TIMEOUT_S = 10
# How many empty responses to a pull come before those with content.
CONTINUED = 20


class FakePrefiller:
    """Answers on a thread once `release()` was called; `kinds` are its engine ids.

    "mixed" reports each request as the first word of its transfer id says: ok, err, or
    missing for not at all, in many responses in a row. "error" fails the whole pull.
    """

    kinds = ("mixed", "error")

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
                for answer in self._answers(kind, message):
                    socket.send_multipart((identity, answer))
        except zmq.ContextTerminated:
            socket.close(linger=0)

    def _answers(self, kind: str, message: bytes) -> list[bytes]:
        status = self._module.MooncakeXferResponseStatus
        response = self._module.MooncakeXferResponse
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


PROMPT_TOKENS = 70

Problems = list[str]


def recomputed(world: World, request: str) -> bool:
    fate = world.fates[request]
    return fate.complete and fate.computed_tokens >= PROMPT_TOKENS


def pulled(world: World, request: str) -> bool:
    """Pulled, with the last token computed again, as vLLM does on a full hit."""
    fate = world.fates[request]
    return (
        fate.complete
        and fate.pulled_tokens == PROMPT_TOKENS
        and fate.computed_tokens == fate.output_tokens
    )


def failed(world: World, request: str) -> bool:
    fate = world.fates[request]
    return fate.finish_reason == "error" and fate.new_tokens == 0


def must(holds: bool, words: str) -> Problems:
    return [] if holds else [words]


# The decode side.


def aborted_before_scheduled(world: World) -> Problems:
    """The prefiller's blocks must come back too, long before its timeout."""
    prefill = world.prefill("t")
    world.abort(world.decode("t"))
    problems = world.settle()
    return problems + must(world.fates[prefill].complete, "the prefill is not complete")


def aborted_while_waiting(world: World) -> Problems:
    decode = world.decode("t")
    world.until(lambda: world.waiting_for_remote_kv(decode))
    world.abort(decode)
    steps(world)
    problems = must(world.known([decode]) == [decode], "blocks freed before the pull")
    world.prefill("t")
    return problems + world.settle()


def aborted_while_sending(world: World) -> Problems:
    """While bytes are under way to blocks, the blocks must not go to other requests."""
    send, problems = world.worker._send_blocks, []
    begun, may_end = threading.Event(), threading.Event()

    def slow_send(*arguments):
        begun.set()
        may_end.wait()
        return send(*arguments)

    world.worker._send_blocks = slow_send
    prefill, decode = world.prefill("t"), world.decode("t")
    problems += must(world.until(begun.is_set), "nothing was sent")
    world.abort(prefill, decode)
    try:
        steps(world)
    finally:
        may_end.set()
    both = world.known([prefill, decode])
    problems += must(len(both) == 2, "blocks freed before the bytes had arrived")
    return problems + world.settle()


def pull_failed(world: World, outcome: Callable, abort: bool = False) -> Problems:
    """All ways in which a pull fails, at the same time, and good pulls among them."""
    with fake_prefiller(world) as prefiller:
        bad = [
            world.decode(f"{kind}-{number}", engine_id="mixed")
            for kind in ("err", "missing")
            for number in range(2)
        ]
        good = [world.decode(f"ok-{number}", engine_id="mixed") for number in range(2)]
        bad.append(world.decode("x", engine_id="error"))
        world.until(lambda: world.waiting_for_remote_kv(*good, *bad))
        if abort:
            world.abort(*good, *bad)
        prefiller.release()
        problems = world.settle()
    if abort:
        return problems
    fates = world.fates
    problems += [f"{fates[r]}: not pulled" for r in good if not pulled(world, r)]
    problems += [
        f"{fates[r]}: not {outcome.__name__}" for r in bad if not outcome(world, r)
    ]
    return problems


def pull_failed_and_is_recomputed(world: World) -> Problems:
    return pull_failed(world, recomputed)


def pull_failed_and_fails_the_request(world: World) -> Problems:
    return pull_failed(world, failed)


def pull_failed_after_abort(world: World) -> Problems:
    return pull_failed(world, recomputed, abort=True)


@contextmanager
def fake_prefiller(world: World) -> Iterator[FakePrefiller]:
    prefiller = FakePrefiller(sys.modules[type(world.worker).__module__], world.worker)
    try:
        yield prefiller
    finally:
        prefiller.close()


def prefiller_not_found(world: World) -> Problems:
    """Nothing listens at the bootstrap address, or it does not know the engine."""
    lost = [
        world.decode("t", engine_id="gone"),
        world.decode("u", engine_id="gone", bootstrap="http://127.0.0.1:9"),
    ]
    return world.settle() + must(
        all(recomputed(world, request) for request in lost), "not recomputed"
    )


def nothing_fails(world: World) -> Problems:
    decodes = []
    for number in range(8):
        world.prefill(f"t{number}")
        decodes.append(world.decode(f"t{number}"))
    return world.settle() + must(
        all(pulled(world, request) for request in decodes), "not pulled"
    )


# The prefill side.


def prefills_aborted_together(world: World) -> Problems:
    """Every decoder that waits for one is told at once."""
    numbers = range(8)
    waiting = [world.decode(f"s{n}") for n in numbers]
    problems = prefills_aborted_alone(
        world, lambda: world.until(lambda: world.waiting_for_remote_kv(*waiting))
    )
    return problems + must(
        all(recomputed(world, request) for request in waiting), "not recomputed"
    )


def prefills_aborted_alone(
    world: World, until: Callable[[], object] = lambda: None
) -> Problems:
    """Some were never scheduled: the others of the same step are forgotten, too."""
    numbers = range(8)
    scheduled = [world.prefill(f"s{n}", output_tokens=400) for n in numbers]
    until()
    steps(world)
    unscheduled = [world.prefill(f"u{n}") for n in numbers]
    world.abort(*scheduled, *unscheduled)
    problems = world.settle()
    left = world.worker.reqs_need_send
    return problems + must(not left, f"{len(left)} transfers not forgotten")


def prefill_aborted_before_scheduled_while_decoder_waits(world: World) -> Problems:
    waiting = world.decode("t")
    world.until(lambda: world.waiting_for_remote_kv(waiting))
    world.until(lambda: "t" in world.worker.reqs_need_send)
    world.abort(world.prefill("t"))
    return world.settle() + must(recomputed(world, waiting), "not recomputed")


def fewer_blocks_than_wanted(world: World) -> Problems:
    """Refusing one request does not end the transfer of the others."""
    set_timeout(SHORT_TIMEOUT_S)
    short = world.prefill("short", tokens=20)
    world.until(lambda: world.fates[short].complete)
    steps(world)
    set_timeout(LONG_TIMEOUT_S)
    enough = world.prefill("enough")
    world.until(lambda: world.fates[enough].complete)
    bad, good = world.decode("short"), world.decode("enough")
    problems = world.settle()
    problems += must(pulled(world, good), f"{world.fates[good]}: not pulled")
    return problems + must(
        recomputed(world, bad), f"{world.fates[bad]}: not recomputed"
    )


def steps(world: World) -> None:
    for _ in range(20):
        world.step()


PACKAGE = Path(vllm.__file__).parent
RACE = "kv_transfer_abort_race"
SHORT_CIRCUIT = "mooncake_get_finished_short_circuit"
STORM_PAIRS, STORM_SEEDS = 40, 2
STORM_TIMEOUT_S = 1
# Long enough to see that code goes wrong where that is expected.
LITTLE_PATIENCE_S = 1.0


@functools.cache
def code(*names: str, without: str | None = None) -> Code:
    """vLLM's modules with these patches; `without` leaves out a block of the last."""
    patches = [patch(name) for name in names]
    if without is not None:
        patches[-1] = patch(names[-1], without=without)
    place = Path(tempfile.mkdtemp())
    return Code(
        *(
            load(patched_source(PACKAGE, f, patches, place))
            for f in (CONNECTOR, SCHEDULER)
        )
    )


def run(
    engine: MooncakeEngine,
    code: Code,
    scenario: str | Callable[[World], Problems],
    policy: str = "recompute",
    timeout_s: float = LONG_TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Problems:
    """What goes wrong in a world of that code, the engine's death included."""
    if isinstance(scenario, str):
        policy = "fail" if scenario in FAILING else policy
        scenario = globals()[scenario]
    try:
        return scenario(World(engine, code, policy, timeout_s, patience_s))
    except Exception:
        return [traceback.format_exc(limit=-1)]


def needs_block(block: str, file: str = CONNECTOR) -> None:
    """Skip where the release needs no such block, or none has been made to fit it."""
    if block not in block_ids(RACE, PACKAGE, file):
        pytest.skip(f"the patch's block {block} is not for this release")


def needs_reports() -> None:
    """Skip where a pull that was refused leaves its request waiting, as upstream's."""
    if not reports_failed_pulls(code(RACE).connector):
        pytest.skip("this release's decoder does not report a failed pull")


def goes_wrong(engine: MooncakeEngine, code: Code, scenario) -> bool:
    return bool(run(engine, code, scenario, patience_s=LITTLE_PATIENCE_S))


class Storm:
    """Pairs that arrive, meet and are aborted at random, each at any stage."""

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._chooser = random.Random(seed)
        self._aborted: set[str] = set()
        self._decodes: list[str] = []

    def __call__(self, world: World) -> Problems:
        chooser, due, now = self._chooser, defaultdict(list), 0

        def abort(request: str) -> None:
            self._aborted.add(request)
            world.abort(request)

        def arrive(add: Callable[[str, int], str], transfer_id: str, tokens: int):
            request = add(transfer_id, tokens)
            if add == world.decode:
                self._decodes.append(request)
            if chooser.random() < 0.4:
                # A delay of 0 aborts the request before it is scheduled.
                delay = chooser.choice((0, 0, 1, 2, 3, 5, 8, 13, 40))
                due[now + delay].append(partial(abort, request))

        for pair in range(STORM_PAIRS):
            # Not 1: vLLM computes that token although it was pulled.
            tokens = chooser.choice((2, 15, 16, 17, 33, chooser.randint(2, 100)))
            for add in (world.prefill, world.decode):
                arrival = partial(arrive, add, f"t{pair}", tokens)
                due[chooser.randrange(60)].append(arrival)
        while due:
            while actions := due.pop(now, None):
                chooser.shuffle(actions)
                for action in actions:
                    action()
            world.step()
            now += 1
        return world.settle() + self._fates(world)

    def _fates(self, world: World) -> Problems:
        problems = []
        for request in self._decodes:
            fate = world.fates[request]
            if request in self._aborted:
                self.counts["aborted"] += 1
            elif fate.complete:
                self.counts["pulled" if fate.pulled_tokens else "recomputed"] += 1
            elif not world.scheduler.recompute_kv_load_failures and failed(
                world, request
            ):
                self.counts["failed"] += 1
            else:
                problems.append(f"{fate}: neither complete nor failed")
        return problems


def storms(
    engine: MooncakeEngine, code: Code, policy: str, patience_s: float = PATIENCE_S
) -> dict:
    problems, counts = [], Counter()
    for seed in range(STORM_SEEDS):
        storm = Storm(seed)
        problems += run(engine, code, storm, policy, STORM_TIMEOUT_S, patience_s)
        counts += storm.counts
    return {"problems": problems, "counts": counts}


# The worker of tools/upstream/aborts.py.

STORMS = {f"storm_{policy}": policy for policy in ("recompute", "fail")}


def names(_: MooncakeEngine) -> list[str]:
    return [*SCENARIOS, *STORMS]


def problems_of(engine: MooncakeEngine, name: str, patience_s: float) -> Problems:
    """What goes wrong in a scenario or in storms, without any patch."""
    if policy := STORMS.get(name):
        return storms(engine, code(), policy, patience_s)["problems"]
    return run(engine, code(), name, patience_s=patience_s)


if __name__ == "__main__":
    model, socket = sys.argv[1:]
    serve(MooncakeEngine(Path(model)), socket, names, problems_of)
