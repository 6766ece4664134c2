# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a Mooncake transfer, one scenario each, on a World.

A scenario returns the problems of the engine afterwards, in words. The abort-race patch
promises that there are none: the engine is alive, every request ended, every block is
back.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from fake_prefiller import FakePrefiller
from mooncake_world import LONG_TIMEOUT_S, World
from vllm import envs

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
    for _ in range(20):
        world.step()
    problems = must(world.known([decode]) == [decode], "blocks freed before the pull")
    world.prefill("t")
    return problems + world.settle()


def aborted_while_sending(world: World) -> Problems:
    """While bytes are under way to blocks, the blocks must not go to other requests."""
    send, sending, problems = world.worker._send_blocks, [], []

    def slow_send(*arguments):
        sending.append(arguments)
        time.sleep(0.3)
        return send(*arguments)

    world.worker._send_blocks = slow_send
    prefill, decode = world.prefill("t"), world.decode("t")
    problems += must(world.until(lambda: bool(sending)), "nothing was sent")
    world.abort(prefill, decode)
    for _ in range(20):
        world.step()
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
    for _ in range(20):
        world.step()
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
    """The prefiller refuses them at once, and remembers aborts for a while only."""
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 2
    world.abort(world.prefill("nobody asks"))
    world.until(lambda: "nobody asks" in world.worker.aborted_sends)
    time.sleep(2.1)
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = LONG_TIMEOUT_S
    world.abort(*(world.prefill(f"u{n}") for n in range(2)))
    for _ in range(20):
        world.step()
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = 2
    world.abort(world.prefill("another"))
    world.until(lambda: "another" in world.worker.aborted_sends)
    remembered = set(world.worker.aborted_sends)
    envs.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = LONG_TIMEOUT_S
    late = [world.decode(f"u{n}") for n in range(2)]
    problems = world.settle()
    problems += must(remembered == {"u0", "u1", "another"}, f"remembers {remembered}")
    left = world.worker.reqs_need_send
    problems += must(not left, f"{len(left)} transfers not forgotten")
    return problems + must(
        all(recomputed(world, request) for request in late), "not recomputed"
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
