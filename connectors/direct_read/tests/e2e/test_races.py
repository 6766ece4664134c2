# SPDX-License-Identifier: Apache-2.0
"""A evicts or still computes what B reads: no answer has a wrong token.

An instance that is held at a gate makes a race happen each time. Two tests are negative
controls: without in-flight exclusion, or without validation, the tokens must be wrong.
"""

from __future__ import annotations

import pytest

from connectors.direct_read.bench.gates import (
    LOOKUP,
    OFFER_IN_FLIGHT,
    READ,
    STEP,
    TRUST_ALL,
    VALIDATE,
)
from tests.harness.tiny.checkpoint import prompt

from .bench import MOMENTS, evict_all, full_blocks

pytestmark = pytest.mark.long


async def test_blocks_still_being_computed_are_not_offered(bench):
    asked = prompt(105_000, 1000)
    computed = bench.a.complete(asked)
    async with bench.a.held_at(STEP, computed) as theirs, bench.pulled(0):
        await bench.right(bench.ask(asked), asked)
    await bench.right(theirs, asked)
    assert await bench.a.count("served_in_flight") == 1


async def test_control_without_in_flight_exclusion_tokens_are_wrong(bench):
    asked = prompt(106_000, 1000)
    bench.a.close_gate(OFFER_IN_FLIGHT)
    try:
        async with (
            bench.a.held_at(STEP, bench.a.complete(asked)) as theirs,
            bench.pulled(full_blocks(asked)),
        ):
            await bench.wrong(bench.ask(asked), asked)
    finally:
        bench.a.open_gate(OFFER_IN_FLIGHT)
    await theirs


@pytest.mark.parametrize("gate", MOMENTS)
async def test_blocks_evicted_meanwhile_are_computed(bench, gate):
    asked = prompt(107_000 + MOMENTS.index(gate), 1000)
    await bench.prepare(asked)
    rejected = await bench.b.count("blocks_rejected")
    async with bench.pulled(0):
        async with bench.b.held_at(gate, bench.ask(asked)) as answer:
            await evict_all(bench, seed=107_100)
        await bench.right(answer, asked)
    rejected = await bench.b.count("blocks_rejected") - rejected
    assert rejected == (0 if gate == LOOKUP else full_blocks(asked))


async def test_blocks_evicted_and_cached_again_meanwhile_are_computed(bench):
    asked = prompt(108_000, 1000)
    await bench.prepare(asked)
    async with bench.pulled(0):
        async with bench.b.held_at(VALIDATE, bench.ask(asked)) as answer:
            await evict_all(bench, seed=108_100)
            await bench.a.complete(asked, 1)
        await bench.right(answer, asked)


async def test_control_without_validation_tokens_are_wrong(bench):
    asked = prompt(109_000, 1000)
    await bench.prepare(asked)
    bench.b.close_gate(TRUST_ALL)
    try:
        async with bench.pulled(full_blocks(asked)):
            async with bench.b.held_at(READ, bench.ask(asked)) as answer:
                await evict_all(bench, seed=109_100)
            await bench.wrong(answer, asked)
    finally:
        bench.b.open_gate(TRUST_ALL)
