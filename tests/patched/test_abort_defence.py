# SPDX-License-Identifier: Apache-2.0
"""kv_transfer_abort_defence: the scheduler survives what nobody waits for."""

from __future__ import annotations

import logging

import pytest
from abort_lab import DEFENCE, PACKAGE, code, goes_wrong, run
from abort_scenarios import Problems
from mooncake_world import World
from variants import SCHEDULER, block_ids
from vllm.v1.outputs import KVConnectorOutput

PATCHES = ["mooncake_cpu_layout"]
BLOCKS = ["drop", "drop_unexpected"]


def reported_by_mistake(world: World) -> Problems:
    """A connector says that it has received what no request waits for."""
    world.worker.finished_recving_reqs.add("nobody")
    world.step()
    return world.settle()


def test_upstreams_engine_dies_of_what_nobody_waits_for(mooncake_engine):
    (death,) = run(mooncake_engine, code(), reported_by_mistake)
    assert "assert req_id in self.requests" in death


def test_alone_it_keeps_the_engine_alive(mooncake_engine):
    for scenario in (reported_by_mistake, "aborted_before_scheduled"):
        assert run(mooncake_engine, code(DEFENCE), scenario) == []


def test_no_block_is_left_out_below():
    assert set(BLOCKS) == set(block_ids(DEFENCE, PACKAGE, SCHEDULER))


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_is_needed(mooncake_engine, block):
    without = code(DEFENCE, without=block)
    assert goes_wrong(mooncake_engine, without, reported_by_mistake)


def test_what_nobody_waits_for_is_dropped_and_logged_and_nothing_else(mooncake_engine):
    patched = code(DEFENCE)
    world = World(mooncake_engine, patched)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    patched.scheduler.logger.addHandler(handler)
    running, aborted, sent = world.add(20, 400), world.decode("a"), world.prefill("s")
    received, waiting = world.decode("r"), world.decode("w")
    world.until(lambda: world.waiting_for_remote_kv(aborted, received, waiting))
    world.until(lambda: world.fates[sent].complete)
    world.abort(aborted)
    world.scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(
            finished_recving={"nobody", running, received, aborted},
            finished_sending={"no one", waiting, received, aborted, sent},
        )
    )
    logged = {message.split(" of ")[-1] for message in messages}
    assert logged == {"nobody", "no one", running, waiting}
    assert len(messages) == 4
    assert world.known([aborted, sent]) == []
    assert world.scheduler.finished_recving_kv_req_ids == {received}
    assert world.known([running, waiting]) == [running, waiting]
