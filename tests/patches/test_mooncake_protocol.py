# SPDX-License-Identifier: Apache-2.0
"""Aborts and failures between Mooncake workers, the patch on both, one or no side."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from itertools import product

import pytest
from hypothesis import example, given, settings

from kvtax import patcher
from kvtax.paths import PATCHES
from tests.patches.mooncake_protocol import (
    SIDES,
    TIMEOUT_S,
    TRAFFIC,
    TRANSFERS_S,
    Pair,
    Sources,
    Traffic,
    make_sources,
    protocol,
)
from tests.patches.test_releases import RELEASES

# The oldest release and the newest one.
ENDS = (RELEASES[0], RELEASES[-1])
RACE = patcher.load_patch(PATCHES / "kv_transfer_abort_race")


@pytest.fixture(scope="module", params=RELEASES)
def sources(request, tmp_path_factory) -> Sources:
    return make_sources(request.param, RACE, tmp_path_factory.mktemp("vllm"))


WAITING_BATCH = [
    *[("schedule", "u"), ("step",), ("pull", [("t", 1), ("u", 1)])],
    *[("abort_unscheduled", "t"), ("step",)],
]


def run(sources: Sources, p: str, d: str, events: list[tuple]) -> Traffic:
    with closing(Pair(sources[p], sources[d])) as pair:
        return Traffic(pair).run(events)


def check_all_mixes(sources: Sources, events: list[tuple]) -> None:
    runs = {(p, d): run(sources, p, d, events) for p, d in product(SIDES, SIDES)}
    upstream = runs["upstream", "upstream"]
    for (p, d), traffic in runs.items():
        assert traffic.received() >= upstream.received(), (p, d)
        if p == "patched":
            # Nothing that P has not written is taken as received.
            assert traffic.taken_as_received() == traffic.received(), (p, d)
            # P's blocks come back once, and only what was kept.
            ends = traffic.pair.ended_sends
            assert traffic.kept == ends.keys(), (p, d)
            assert set(ends.values()) <= {1}, (p, d)
        if d == "patched":
            # The scheduler knows no request of an empty pull, nor one that has ended.
            assert traffic.finished() <= traffic.wanted(), (p, d)
            assert set(traffic.pair.ended_pulls.values()) <= {1}, (p, d)
            if hasattr(traffic.pair.d, "fail_pulls"):
                answered = traffic.pair.answered & traffic.wanted()
                assert answered <= traffic.finished(), (p, d)


AT_ONCE_S = 0.1


def check_every_pull_ends(sources: Sources, events: list[tuple]) -> None:
    """And that of a request which P aborts at once, or after what is being sent."""
    with closing(Pair(sources["patched"], sources["patched"])) as pair:
        traffic = Traffic(pair)
        for event in events:
            aborted = traffic.pulls_of_aborted() if event == ("step",) else set()
            traffic.run([event])
            traffic.wait(AT_ONCE_S if aborted else 0)
            while pair.transfers_under_way and not aborted <= traffic.finished():
                traffic.wait(max(TRANSFERS_S))
            assert aborted <= traffic.finished()
        assert traffic.finished() == traffic.wanted()
        assert traffic.failed() == traffic.wanted() - traffic.received()


def check_answered_at_once(sources: Sources) -> None:
    """An aborted request of a batch, while another is computed."""
    traffic = run(sources, "patched", "patched", WAITING_BATCH)
    assert [a.err_reqs for a in traffic.pair.answers if a.err_reqs] == [["d0"]]
    assert traffic.ended() == ({"d0"} if reports_failed_pulls(sources) else set())
    finish = [("finish", 0, 1), ("end",)]
    for d in SIDES:
        traffic = run(sources, "patched", d, [*WAITING_BATCH, *finish])
        assert traffic.received() == {"d1"}


def check_all(sources: Sources, events: list[tuple]) -> None:
    check_all_mixes(sources, events)
    if reports_failed_pulls(sources):
        check_every_pull_ends(sources, events)
    check_answered_at_once(sources)


def reports_failed_pulls(sources: Sources) -> bool:
    worker = protocol(sources["patched"]).MooncakeConnectorWorker
    return bool({"fail_pulls", "_handle_failed_recv"} & vars(worker).keys())


# P has fewer blocks than D asks for.
TOO_FEW = [
    *[("schedule", "t"), ("step",), ("finish", 0, 1), ("step",)],
    *[("pull", [("t", 3)]), ("end",)],
]
# The other request of the message is sent.
TOO_FEW_OF_ONE = [
    *[("schedule", "t"), ("schedule", "u"), ("step",), ("finish", 0, 1)],
    *[("finish", 0, 1), ("step",), ("pull", [("t", 3), ("u", 1)]), ("end",)],
]


def check_refused_pull(sources: Sources) -> None:
    """A pull that asks for too many blocks takes none from the next one."""
    events = [*TOO_FEW[:-1], ("wait", 1), ("step",), ("pull", [("t", 1)])]
    traffic = run(sources, "patched", "patched", [*events, ("wait", 1), ("step",)])
    assert traffic.received() == {"d1"}


SAME_IN_EVERY_RUN = settings(derandomize=True)


@pytest.mark.slow
@SAME_IN_EVERY_RUN
@given(TRAFFIC)
@example(TOO_FEW)
@example(TOO_FEW_OF_ONE)
def test_with_either_side_unpatched_nothing_gets_worse(sources, events):
    check_all_mixes(sources, events)


@pytest.mark.slow
@SAME_IN_EVERY_RUN
@given(TRAFFIC)
def test_every_pull_ends_where_both_sides_are_patched(sources, events):
    if not reports_failed_pulls(sources):
        pytest.skip("this release's decoder does not report a failed pull")
    check_every_pull_ends(sources, events)


@pytest.mark.slow
@pytest.mark.parametrize("sources", ENDS, indirect=True)
def test_a_pull_that_was_refused_takes_nothing_from_the_next(sources):
    check_refused_pull(sources)


@pytest.mark.slow
def test_an_aborted_request_of_a_batch_is_answered_at_once(sources):
    check_answered_at_once(sources)


@pytest.mark.parametrize("sources", ENDS[1:], indirect=True)
def test_the_last_answer_omits_what_is_gone_where_decoders_then_fail_it(sources):
    """As upstream's own prefiller does with what has expired."""
    aborted = [("schedule", "t"), ("step",), ("pull", [("t", 1)]), ("abort", 0)]
    traffic = run(sources, "patched", "patched", [*aborted, ("step",), ("step",)])
    assert [(a.ok_reqs, a.err_reqs) for a in traffic.pair.answers] == [(None, None)]
    assert traffic.failed() == traffic.ended() == {"d0"}


@pytest.mark.slow
@pytest.mark.parametrize(("p", "d"), list(product(SIDES, SIDES)))
@pytest.mark.parametrize("early", [False, True])
def test_an_aborted_id_can_be_used_again(sources, p, d, early):
    """Also by a decoder that is faster than the prefiller."""
    aborted = [("schedule", "t"), ("step",), ("abort", 0), ("step",)]
    if p == "patched":
        aborted += [("abort_unscheduled", "t"), ("step",)]
    send = [("schedule", "t"), ("step",), ("finish", 0, 2), ("step",)]
    pull = [("pull", [("t", 2)])]
    again = [*pull, *send] if early else [*send, *pull]
    traffic = run(sources, p, d, [*aborted, *again, ("wait", 1), ("step",)])
    assert traffic.received() == {"d0"}
    assert traffic.pair.ended_sends == dict.fromkeys(traffic.kept, 1)


FIRST_ON_THE_WIRE = [
    *[("transfers_take", 3), ("schedule", "t"), ("step",), ("finish", 0, 2)],
    *[("step",), ("pull", [("t", 2)])],
]
LATER_REQUEST = [("schedule", "t"), ("step",), ("finish", 0, 2), ("step",)]
LATER_PULL = [("wait", 1), ("pull", [("t", 2)])]
SECONDS = [("wait", 1), ("step",)]
# Uses of a transfer id while the blocks of its first request are being sent.
REUSED = {
    "by a request": [*FIRST_ON_THE_WIRE, *LATER_REQUEST],
    "by a pull": [*FIRST_ON_THE_WIRE, *LATER_PULL],
    "by a request that is aborted": [
        *[*FIRST_ON_THE_WIRE, ("schedule", "t"), ("step",), ("abort", 0), ("step",)],
        *[("wait", 4), *LATER_REQUEST, ("pull", [("t", 2)])],
    ],
    "by a request and its pull": [*FIRST_ON_THE_WIRE, *LATER_REQUEST, *LATER_PULL],
    "by two requests and a pull": [
        *[*FIRST_ON_THE_WIRE, *LATER_REQUEST, *LATER_REQUEST, *LATER_PULL],
    ],
    "by a pull that fails": [
        *[*FIRST_ON_THE_WIRE, *LATER_REQUEST, ("transfers_fail", True), *LATER_PULL],
        *[("wait", 4), ("transfers_fail", False), ("pull", [("t", 2)])],
    ],
    "whose pull fails": [
        *[("transfers_fail", True), *FIRST_ON_THE_WIRE, *LATER_REQUEST],
        *[("wait", 1), ("transfers_fail", False), ("wait", 4), ("pull", [("t", 2)])],
    ],
    # Its message sends another request first.
    "by a pull that began before": [
        *[("transfers_take", 3), ("schedule", "u"), ("step",), ("finish", 0, 1)],
        *[("step",), ("pull", [("u", 1), ("t", 2)]), *LATER_REQUEST],
        *[("transfers_take", 5), ("pull", [("t", 2)]), *LATER_REQUEST],
    ],
}


def check_reused(sources: Sources, events: list[tuple]) -> None:
    """Blocks stay until the last transfer that reads them, and come back once."""
    check_all_mixes(sources, [*events, *SECONDS * 10, ("end",)])
    traffic = run(sources, "patched", "patched", [*events, *SECONDS * 10])
    # Long before a timeout, each pull has got its bytes but for that made to fail.
    failures = events.count(("transfers_fail", True))
    assert len(traffic.received()) == len(traffic.wanted()) - failures
    read = set(traffic.pair.memory.values())
    assert traffic.pair.freed >= read


@pytest.mark.parametrize("use", REUSED)
@pytest.mark.parametrize("sources", ENDS, indirect=True)
def test_an_id_can_be_used_again_while_its_first_request_is_being_sent(sources, use):
    check_reused(sources, REUSED[use])


def check_two_ranks(sources: Sources) -> None:
    """A request that replaces another, which a rank has read, is read by both ranks."""
    pull = [("pull", [("t", 2)]), ("wait", 1), ("step",)]
    with closing(Pair(sources["patched"], sources["patched"], ranks=2)) as pair:
        traffic = Traffic(pair).run([*LATER_REQUEST, *pull, *LATER_REQUEST])
        assert pair.ended_sends == {"p1": 1}
        traffic.run(pull)
        assert pair.ended_sends == {"p1": 1}
        traffic.run(pull)
        assert pair.ended_sends == {"p1": 1, "p2": 1}
        assert traffic.received() == {"d0", "d1", "d2"}


@pytest.mark.parametrize("sources", ENDS, indirect=True)
def test_a_request_is_sent_to_all_ranks_where_its_id_was_used_before(sources):
    check_two_ranks(sources)


def check_unknown_abort(sources: Sources) -> None:
    """Other aborts of the step count."""
    events = [("schedule", "t"), ("step",), ("pull", [("t", 1)])]
    events += [("abort_unscheduled", "x"), ("abort", 0), ("step",)]
    traffic = run(sources, "patched", "patched", [*events, ("wait", 1), ("step",)])
    assert traffic.pair.p.reqs_need_send == {}
    assert traffic.ended() == ({"d0"} if reports_failed_pulls(sources) else set())


@pytest.mark.parametrize("sources", ENDS, indirect=True)
def test_the_abort_of_an_unknown_request_hides_no_other(sources):
    check_unknown_abort(sources)


# What only this block of the patch puts right.
NEEDS = {
    "forget": WAITING_BATCH,
    "same_id": [
        *[("schedule", "t"), ("schedule", "t"), ("step",), ("abort", 0), ("step",)],
        *[("finish", 0, 1), ("step",)],
    ],
    # The id is in use again before the answer about "u" has left.
    "gone": [
        *[("schedule", "u"), ("step",), ("pull", [("t", 0), ("u", 1)])],
        *[("finish", 0, 1), ("step",), ("abort_unscheduled", "t"), ("step",)],
        *[("schedule", "t"), ("step",), ("wait", 1), ("step",)],
    ],
    "name_failed": WAITING_BATCH,
    "failed_answer": WAITING_BATCH,
}


@pytest.mark.slow
@pytest.mark.parametrize("block", NEEDS)
@pytest.mark.parametrize("sources", ENDS, indirect=True)
def test_each_block_is_needed(sources, block, tmp_path, request):
    events = [*NEEDS[block], ("end",)]
    check_all(sources, events)
    blocks = tuple(each for each in RACE.blocks if each.id != block)
    without = dataclasses.replace(RACE, blocks=blocks)
    release = request.node.callspec.params["sources"]
    if block == "failed_answer" and release != "0.18.1":
        pytest.skip("the block is for 0.18.1")
    with pytest.raises(AssertionError):
        check_all(make_sources(release, without, tmp_path), events)


SHORT_CIRCUIT = patcher.load_patch(PATCHES / "mooncake_get_finished_short_circuit")


@pytest.fixture(scope="module", params=RELEASES)
def short_circuit(request, tmp_path_factory) -> Sources:
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
                assert any(map(any, patched.pair.reports)) or (
                    look_at_s in patched.pair.expiries_s
                    and may_look(patched.pair, look_at_s)
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


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_every_step_reports_what_upstream_reports(short_circuit, both):
    """On a simulated clock, so that sends expire to the instant."""

    @given(TRAFFIC)
    def run(events):
        check_same_reports(short_circuit, both, events)

    run()


# Three sends that expire one after the other; then one that is sent after its time,
# while another is kept.
TOUR = [
    *[("schedule", id) for id in "tuv"],
    ("step",),
    *[("finish", 0, 1), ("step",), ("wait", 100)] * 3,
    *[("wait", TIMEOUT_S - 330), ("step",), ("wait", 30), ("step",)],
    *[("wait", 0.5), ("step",), ("step",), ("wait", 99.5), ("step",)] * 3,
    *[("wait", 1), ("step",), ("schedule", "t"), ("step",)],
    *[("finish", 0, 2), ("step",)],
    *[("schedule", "u"), ("step",), ("finish", 0, 1), ("step",), ("wait", TIMEOUT_S)],
    *[("pull", [("t", 2)]), ("wait", 0.001), ("step",), ("wait", 1), ("step",)],
    *[("step",), ("pull", [("u", 1)]), ("wait", 1), ("step",), ("step",)],
    # A send that fails after the loops were asked, and expires.
    *[("schedule", "t"), ("schedule", "u"), ("step",), ("finish", 0, 1)],
    *[("finish", 0, 1), ("step",), ("transfers_take", 3), ("transfers_fail", True)],
    *[("pull", [("t", 1)]), ("transfers_fail", False), ("transfers_take", 0.01)],
    *[("pull", [("u", 1)]), ("wait", 1), ("step",), ("wait", 3), ("step",)],
    *[("wait", TIMEOUT_S), ("step",)],
]
EXPIRY = "self.next_send_expire_time <= time.perf_counter()"
# Per block, what stands there and what is put in its place.
EDITS = {
    "not asked after received": ("get_finished", "self.finished_recving_reqs", "False"),
    "not asked after sent": ("get_finished", "self.finished_sending_reqs", "False"),
    "not asked after expiry": ("get_finished", EXPIRY, "False"),
    "asked long before expiry": ("get_finished", EXPIRY, f"{EXPIRY} + 60"),
    "recorded too early": (
        "expire_time",
        "send_meta.expire_time\n",
        "send_meta.expire_time - 60\n",
    ),
    "asked of no send": ("next_expire_time", 'float("inf")', "0.0"),
    "latest recorded instead of first to expire": (
        "expire_time",
        "    self.next_send_expire_time, send",
        "    send_meta.expire_time, send",
    ),
    "last left instead of first to expire": ("next_expire_time", "min(", "max("),
    "those being sent are not looked at": (
        "next_expire_time",
        "values())",
        "values() if not send_meta.sending)",
    ),
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


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("short_circuit", ENDS, indirect=True)
def test_each_block_and_condition_is_needed(short_circuit, edit, tmp_path, request):
    check_same_reports(short_circuit, True, TOUR)
    name, old, new = EDITS[edit]
    blocks = [
        dataclasses.replace(block, code=block.code.replace(old, new))
        if block.id == name
        else block
        for block in SHORT_CIRCUIT.blocks
    ]
    assert blocks != list(SHORT_CIRCUIT.blocks)
    blocks = tuple(block for block in blocks if block.code)
    release = request.node.callspec.params["short_circuit"]
    wrong = dataclasses.replace(SHORT_CIRCUIT, blocks=blocks)
    with pytest.raises(AssertionError):
        check_same_reports(make_sources(release, wrong, tmp_path), True, TOUR)
