# SPDX-License-Identifier: Apache-2.0
"""Mooncake's get_finished with the short-circuit, in step with upstream's."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing

import pytest
from hypothesis import given, settings

from kvtax import patcher
from kvtax.paths import PATCHES
from tests.patches.mooncake_protocol import (
    SIDES,
    TIMEOUT_S,
    TRAFFIC,
    Pair,
    Sources,
    Traffic,
    make_sources,
)
from tests.patches.test_releases import RELEASES

SHORT_CIRCUIT = patcher.load_patch(PATCHES / "mooncake_get_finished_short_circuit")


@pytest.fixture(scope="module", params=RELEASES)
def sources(request, tmp_path_factory) -> Sources:
    place = tmp_path_factory.mktemp("vllm")
    return make_sources(request.param, SHORT_CIRCUIT, place)


def check_same_reports(sources: Sources, both: bool, events: list[tuple]) -> None:
    """And the loops are waited for only where they report, or a send may be due."""
    with ExitStack() as stack:
        upstream, patched = (
            Traffic(stack.enter_context(closing(Pair(sources[s], sources[s], both))))
            for s in SIDES
        )
        for event in events:
            waits, look_at_s = patched.pair.waits, patched.pair.p.next_send_expire_time
            for traffic in (upstream, patched):
                traffic.run([event])
            assert patched.pair.reports == upstream.pair.reports, event
            if event == ("step",) and patched.pair.waits > waits:
                assert any(map(any, patched.pair.reports)) or may_look(
                    patched.pair, look_at_s
                )
        assert patched.pair.ended_sends == upstream.pair.ended_sends
        assert patched.pair.ended_pulls == upstream.pair.ended_pulls


def may_look(pair: Pair, look_at_s: float) -> bool:
    """Whether a send has expired that is kept, or one that is gone was to expire now.

    While it is sent it stays. Of one that is gone the look is the last.
    """
    entries = pair.p.reqs_need_send.values()
    is_due = any(entry.expire_time <= pair.clock.now_s for entry in entries)
    return is_due or look_at_s <= pair.clock.now_s < pair.p.next_send_expire_time


@pytest.mark.parametrize("both", [False, True])
def test_every_step_reports_what_upstream_reports(sources, both):
    """On a simulated clock, so that sends expire to the instant."""

    @settings(max_examples=50)
    @given(TRAFFIC)
    def run(events):
        check_same_reports(sources, both, events)

    run()


# Three sends that expire one after the other; then one that is sent after its time,
# while another is kept.
TOUR = [
    *[("schedule", id) for id in "tuv"],
    ("step",),
    *[("finish", 0, 1), ("step",), ("wait", 100)] * 3,
    *[("wait", TIMEOUT_S - 330), ("step",), ("wait", 30), ("step",)],
    *[("wait", 0.5), ("step",), ("step",), ("wait", 99.5), ("step",)] * 3,
    *[
        ("wait", 1),
        ("step",),
        ("schedule", "t"),
        ("step",),
        ("finish", 0, 2),
        ("step",),
    ],
    *[("schedule", "u"), ("step",), ("finish", 0, 1), ("step",), ("wait", TIMEOUT_S)],
    *[("pull", [("t", 2)]), ("wait", 0.001), ("step",), ("wait", 1), ("step",)],
    *[("step",), ("pull", [("u", 1)]), ("wait", 1), ("step",), ("step",)],
]
EXPIRY = "self.next_send_expire_time <= time.perf_counter()"
# Per block, what stands there and what is put in its place.
EDITS = {
    "not asked after received": ("get_finished", "self.finished_recving_reqs", "False"),
    "not asked after sent": ("get_finished", "self.finished_sending_reqs", "False"),
    "not asked after expiry": ("get_finished", EXPIRY, "False"),
    "asked long before expiry": ("get_finished", EXPIRY, f"{EXPIRY} + 60"),
    "latest recorded instead of first to expire": (
        "expire_time",
        "    self.next_send_expire_time, send",
        "    send_meta.expire_time, send",
    ),
    "last left instead of first to expire": ("next_expire_time", "min(", "max("),
    "only those being sent are looked at": (
        "next_expire_time",
        "values())",
        "values() if send_meta.sending)",
    ),
    **{
        f"without {block.id}": (block.id, block.code, "")
        for block in SHORT_CIRCUIT.blocks
        # That one the engine's own tests miss.
        if block.id != "init"
    },
}


@pytest.mark.parametrize("edit", EDITS)
def test_each_block_and_condition_is_needed(sources, edit, tmp_path, request):
    check_same_reports(sources, True, TOUR)
    name, old, new = EDITS[edit]
    blocks = [
        dataclasses.replace(block, code=block.code.replace(old, new))
        if block.id == name
        else block
        for block in SHORT_CIRCUIT.blocks
    ]
    assert blocks != list(SHORT_CIRCUIT.blocks)
    blocks = tuple(block for block in blocks if block.code)
    release = request.node.callspec.params["sources"]
    wrong = dataclasses.replace(SHORT_CIRCUIT, blocks=blocks)
    with pytest.raises(AssertionError):
        check_same_reports(make_sources(release, wrong, tmp_path), True, TOUR)
