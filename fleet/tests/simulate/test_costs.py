# SPDX-License-Identifier: Apache-2.0
"""A step's host time is both sides', and a link serves one transfer at a time."""

from __future__ import annotations

from kvtax.engine.null_model import Forward

from kvtax_fleet.launch.instance_settings import Transfer
from kvtax_fleet.records.host_times import StepTime, StepTimes
from kvtax_fleet.simulate.cost import Step, StepCost
from kvtax_fleet.simulate.links import Links

STEP = Step(
    requests=3,
    new_requests=1,
    tokens=100,
    context_tokens=2_000,
    attended_tokens=50_000,
    cached_blocks=4_000,
)
# 16 tokens a block at 1,000 bytes: 16 us a block at 8 Gbit/s.
TRANSFER = Transfer(kv_bytes_per_token=1_000, gbit_s=8, latency_us=5)
BLOCK_NS, LATENCY_NS = 16_000, 5_000


def times(scale: int) -> StepTime:
    return StepTime(
        base_us=100 * scale,
        us_per_request=10 * scale,
        us_per_new_request=7 * scale,
        us_per_1k_context_tokens=3 * scale,
        us_per_1k_cached_blocks=2 * scale,
    )


def test_the_host_takes_the_schedulers_and_the_workers_time():
    forward = Forward(0, us_per_token=1)
    own_us = 100 + 3 * 10 + 7 + 2 * 3 + 4 * 2
    for scheduler, worker in ((1, 0), (0, 1), (1, 10)):
        cost = StepCost(forward, StepTimes(times(scheduler), times(worker)))
        assert cost.host_ns(STEP) == 1_000 * own_us * (scheduler + worker)


def links() -> Links:
    return Links(TRANSFER, block_tokens=16)


def test_one_transfer_takes_its_bytes_and_the_latency():
    assert links().carry("p", "d", 10, 1_000) == 1_000 + 10 * BLOCK_NS + LATENCY_NS


def test_transfers_of_one_sender_go_one_after_the_other():
    fleet = links()
    fleet.carry("p", "d", 10, 0)
    assert fleet.carry("p", "e", 5, 0) == 15 * BLOCK_NS + LATENCY_NS


def test_transfers_to_one_receiver_arrive_one_after_the_other():
    fleet = links()
    fleet.carry("p", "d", 10, 0)
    assert fleet.carry("q", "d", 5, 0) == 15 * BLOCK_NS + LATENCY_NS


def test_other_pairs_and_the_other_direction_do_not_wait():
    fleet = links()
    fleet.carry("p", "d", 10, 0)
    assert fleet.carry("q", "e", 5, 0) == 5 * BLOCK_NS + LATENCY_NS
    assert fleet.carry("d", "p", 5, 0) == 5 * BLOCK_NS + LATENCY_NS
