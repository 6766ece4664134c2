# SPDX-License-Identifier: Apache-2.0
"""Scenarios of a Mooncake transfer that fails, on patched and unpatched code.

A scenario returns the problems of the engine afterwards, in words. The abort-race patch
promises that there are none: the engine is alive, every request has ended, every block
is back. Scenarios without a decoder hold on every release.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
    block_ids,
    pull_of,
    reports_failed_pulls,
)
from variants import CONNECTOR, SCHEDULER, load, patch, patched_source
from variants import block_ids as blocks_of_patch
from vllm import envs

from kvtax.engine.engine_process import serve

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
        bad += [
            world.decode("x", engine_id=kind) for kind in ("error", "garbage", "leaver")
        ]
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


def prefiller_late(world: World) -> Problems:
    """A late prefiller may still write: the blocks are kept until it has answered."""
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 1 - 60  # the decoder's is 60 s longer
    with fake_prefiller(world) as prefiller:
        late = [world.decode(f"ok-{number}", engine_id="mixed") for number in range(2)]
        world.until(lambda: world.waiting_for_remote_kv(*late))
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            world.step()
        kept = world.known(late) == late
        told = [world.fates[request].finish_reason for request in late]
        prefiller.release()
        problems = world.settle()
    problems += must(kept, "blocks freed before the prefiller had answered")
    if world.scheduler.recompute_kv_load_failures:
        return problems + must(
            all(recomputed(world, r) for r in late), "not recomputed"
        )
    return problems + must(told == ["error"] * 2, f"told {told} after the timeout")


def prefiller_late_and_the_request_fails(world: World) -> Problems:
    return prefiller_late(world)


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
    """Some were never scheduled; every decoder that waits for one is told at once."""
    numbers = range(8)
    scheduled = [world.prefill(f"s{n}", output_tokens=400) for n in numbers]
    waiting = [world.decode(f"s{n}") for n in numbers]
    world.until(lambda: world.waiting_for_remote_kv(*waiting))
    steps(world)
    unscheduled = [world.prefill(f"u{n}") for n in numbers]
    world.abort(*scheduled, *unscheduled)
    problems = world.settle()
    left = world.worker.reqs_need_send
    problems += must(not left, f"{len(left)} transfers not forgotten")
    return problems + must(
        all(recomputed(world, request) for request in waiting), "not recomputed"
    )


def prefill_aborted_before_scheduled_while_decoder_waits(world: World) -> Problems:
    waiting = world.decode("t")
    world.until(lambda: world.waiting_for_remote_kv(waiting))
    world.until(lambda: "t" in world.worker.reqs_need_send)
    world.abort(world.prefill("t"))
    return world.settle() + must(recomputed(world, waiting), "not recomputed")


def decoders_ask_after_the_abort(world: World) -> Problems:
    """The prefiller refuses them at once."""
    world.abort(*(world.prefill(f"u{n}") for n in range(2)))
    steps(world)
    late = [world.decode(f"u{n}") for n in range(2)]
    problems = world.settle()
    left = world.worker.reqs_need_send
    problems += must(not left, f"{len(left)} transfers not forgotten")
    return problems + must(
        all(recomputed(world, request) for request in late), "not recomputed"
    )


def aborts_are_remembered_for_a_while(world: World) -> Problems:
    """By the patch alone: upstream's worker remembers none."""
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 2
    world.abort(world.prefill("nobody asks"))
    world.until(lambda: "nobody asks" in world.worker.aborted_sends)
    time.sleep(2.1)
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = LONG_TIMEOUT_S
    world.abort(*(world.prefill(f"u{n}") for n in range(2)))
    steps(world)
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 2
    world.abort(world.prefill("another"))
    world.until(lambda: "another" in world.worker.aborted_sends)
    remembered = set(world.worker.aborted_sends)
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = LONG_TIMEOUT_S
    problems = world.settle()
    return problems + must(
        remembered == {"u0", "u1", "another"}, f"remembers {remembered}"
    )


def fewer_blocks_than_wanted(world: World) -> Problems:
    """Refusing one request does not end the transfer of the others."""
    world.prefill("short", tokens=20)
    world.prefill("enough")
    world.until(lambda: all(fate.complete for fate in world.fates.values()))
    bad, good = world.decode("short"), world.decode("enough")
    problems = world.settle()
    problems += must(pulled(world, good), f"{world.fates[good]}: not pulled")
    return problems + must(
        recomputed(world, bad), f"{world.fates[bad]}: not recomputed"
    )


def listener_ends_while_sending(world: World) -> Problems:
    """A decoder that finds the port closed gives the blocks back after a second."""
    send, ended = world.worker._send_blocks, []
    begun = threading.Event()

    def slow_send(*arguments):
        begun.set()
        time.sleep(3)
        ended.append(send(*arguments))
        return ended[0]

    world.worker._send_blocks = slow_send
    world.prefill("t")
    decode = world.decode("t")
    problems = must(world.until(begun.is_set), "nothing was sent")
    port = f"tcp://{world.worker.hostname}:{world.worker.side_channel_port}"
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        # The listener takes messages of two frames; it fails at one of three.
        stranger.connect(port)
        stranger.send_multipart([b"", b""])
        while world.known([decode]) and not ended:
            world.step()
    problems += must(bool(ended), "blocks given back while they were written")
    return problems + world.settle() + must(pulled(world, decode), "not pulled")


ANSWER_S = 60.0


def ask(world: World, *transfer_ids: str) -> tuple[Future, list]:
    """Pulls some blocks of each; the pull's end, and the answers as they come."""
    worker, answers = world.worker, []
    module = sys.modules[type(worker).__module__]

    class Socket:
        async def send_multipart(self, frames):
            answers.append(worker._xfer_resp_decoder.decode(frames[1]))

    wanted = {f"d-{name}": (name, block_ids(module, 1, 2)) for name in transfer_ids}
    sending = worker.send_kv_to_decode(b"d", Socket(), pull_of(module, worker, wanted))
    return asyncio.run_coroutine_threadsafe(sending, worker.sender_loop), answers


def refused(world: World, asked: tuple[Future, list]) -> Problems:
    """What is wrong with it: nothing may be sent, and the decoder is told in time."""
    pull, answers = asked
    problems = must(world.until(pull.done), "not answered")
    pull.cancel()
    sent = [request for answer in answers for request in answer.ok_reqs or ()]
    return problems + must(not sent, f"sent {sent}")


def steps(world: World) -> None:
    for _ in range(20):
        world.step()


def prefills_aborted_alone(world: World) -> Problems:
    """Some were never scheduled: the others of the same step are forgotten, too."""
    numbers = range(8)
    scheduled = [world.prefill(f"s{n}", output_tokens=400) for n in numbers]
    steps(world)
    unscheduled = [world.prefill(f"u{n}") for n in numbers]
    world.abort(*scheduled, *unscheduled)
    problems = world.settle()
    left = world.worker.reqs_need_send
    return problems + must(not left, f"{len(left)} transfers not forgotten")


def asked_for_before_the_abort(world: World) -> Problems:
    """Of one prefill that was scheduled and one that was not."""
    asked = ask(world, "s", "u")
    scheduled = world.prefill("s", output_tokens=400)
    steps(world)
    world.abort(scheduled, world.prefill("u"))
    return refused(world, asked) + world.settle()


def asked_for_after_the_abort(world: World) -> Problems:
    world.abort(world.prefill("t"))
    steps(world)
    return refused(world, ask(world, "t")) + world.settle()


def asked_for_after_it_expired(world: World) -> Problems:
    """As if the prefiller was stopped: the decoder may have given its blocks away."""
    need_send = world.worker.reqs_need_send
    world.prefill("t")
    world.until(lambda: "t" in need_send and need_send["t"].ready.is_set())
    expired = need_send["t"]
    expired.expire_time = time.perf_counter() - 1
    asked = ask(world, "t")
    # No step meanwhile: it would drop what has expired before it is looked at.
    deadline_s = time.monotonic() + ANSWER_S
    while not (asked[0].done() or expired.sending) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return refused(world, asked) + world.settle()


PACKAGE = Path(vllm.__file__).parent
RACE, DEFENCE = "kv_transfer_abort_race", "kv_transfer_abort_defence"
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
    if block not in blocks_of_patch(RACE, PACKAGE, file):
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


# The worker of `python -m studies.abort`.

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
