# SPDX-License-Identifier: Apache-2.0
"""What a prefiller answers to who asks it for what was aborted or has expired.

Scenarios as in abort_scenarios.py, without a decoder: they hold on every release,
whatever its decoders make of the answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future

from abort_scenarios import Problems, must
from mooncake_shapes import block_ids, pull_of
from mooncake_world import World

ANSWER_S = 10.0


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
