# SPDX-License-Identifier: Apache-2.0
"""A request's time is split exactly: nothing is counted twice, nothing is left over."""

from __future__ import annotations

import polars as pl
import pytest

from kvtax.look.requests import TIMED_PARTS, WAITS
from tests.look.conftest import only
from tests.look.made_up_server import FIRST_NS, Server, served

WHOLE = (*WAITS, *TIMED_PARTS, "other_us")
META, FINISHED = "scheduler.build_connector_meta_us", "worker.get_finished_us"


def read(server: Server) -> tuple[pl.DataFrame, dict]:
    """The table of requests, and the records by id."""
    requests = only(server.write()).requests
    return requests, {request["id"]: request for request in server.requests}


def read_row(server: Server) -> dict:
    return read(server)[0].row(0, named=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("span", ["ttft", "e2e"])
def test_the_parts_add_up_to_the_whole(tmp_path, seed, span):
    requests, _ = read(served(tmp_path / "records", seed=seed))
    total = sum(requests[f"{span}.{part}"] for part in WHOLE)
    assert (total - requests[f"{span}_us"]).abs().max() < 1e-3
    for part in WHOLE:
        # Where steps do not overlap, no part can be less than nothing.
        assert requests[f"{span}.{part}"].min() > -1, part
    methods = sum(requests[f"{span}.{name}"] for name in (META, FINISHED))
    assert (methods - requests[f"{span}.connector_us"]).abs().max() < 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_each_part_is_what_a_walk_through_its_steps_finds(tmp_path, seed):
    server = served(tmp_path / "records", seed=seed)
    requests, records = read(server)
    for row in requests.iter_rows(named=True):
        request = records[row["id"]]
        for span, last in (("ttft", "first_token_step"), ("e2e", "last_step")):
            for part, us in walked(server, request, request[last]).items():
                assert row[f"{span}.{part}"] == pytest.approx(us, abs=0.5), part


def walked(server: Server, request: dict, last: int) -> dict[str, float]:
    """Step after step, as the definition says, without a running sum."""
    away = set()
    if moments := request.get("preempted_steps"):
        away = set(range(moments[0], moments[1]))
    first = request["first_step"]
    sums = {"model_us": 0.0, "connector_us": 0.0, "scheduler_us": 0.0}
    queued_ns = server.steps[first]["t_ns"] - request["arrival_ns"]
    for step_id in range(first, last + 1):
        step, worker = server.steps[step_id], server.workers[step_id]
        if step_id in away:
            queued_ns += server.steps[step_id + 1]["t_ns"] - step["t_ns"]
            continue
        meta = step["connector_self_us"]["build_connector_meta"]
        finished = worker["connector_self_us"]["get_finished"]
        sums["connector_us"] += meta + finished
        sums["model_us"] += worker["execute_model_us"] - finished
        sums["scheduler_us"] += step["schedule_us"] + step["update_us"] - meta
    kv = request.get("kv_wait_ns", [0, 0])
    kv_ns = kv[1] - kv[0]
    return sums | {"queued_us": (queued_ns - kv_ns) / 1e3, "kv_wait_us": kv_ns / 1e3}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_that_was_aborted_while_it_queued_only_queued(server, steps):
    for _ in range(steps):
        server.step()
    server.request(finished_ns=FIRST_NS + 700_000, finish_reason="abort")
    row = read_row(server)
    assert row["e2e_us"] == row["e2e.queued_us"] == 700
    assert row["ttft_us"] is None
    assert row["e2e.connector_us"] == row["e2e.model_us"] == 0


def test_tpot_is_the_time_after_the_first_token_per_further_token(server):
    for _ in range(5):
        server.step()
    steps = {"first_step": 0, "first_token_step": 0, "last_step": 4}
    server.request(**steps, finished_ns=server.ends_ns(4), output_tokens=5)
    after_us = (server.ends_ns(4) - server.ends_ns(0)) / 1e3
    assert read_row(server)["tpot_us"] == pytest.approx(after_us / 4)


def test_requests_that_cannot_be_placed_are_counted(server):
    for _ in range(3):
        server.step()
    server.request(id="no end", first_step=0)
    server.request(id="no such step", first_step=99, finished_ns=FIRST_NS + 1)
    server.request(id="fine", finished_ns=FIRST_NS + 1)
    instance = only(server.write())
    assert instance.requests["id"].to_list() == ["fine"]
    kinds = {warning.kind: warning.message for warning in instance.warnings}
    assert kinds["unended_requests"].startswith("1 ")
    assert kinds["unplaced_requests"].startswith("1 ")


def test_one_that_was_preempted_and_given_up_queued_until_its_end(server):
    for _ in range(4):
        server.step()
    ended = {"finished_ns": server.ends_ns(3) + 5_000, "finish_reason": "abort"}
    server.request(
        arrival_ns=FIRST_NS - 50_000, first_step=0, preempted_steps=[2], **ended
    )
    row = read_row(server)
    again_us = (ended["finished_ns"] - server.steps[2]["t_ns"]) / 1e3
    first_us = (server.steps[0]["t_ns"] - FIRST_NS) / 1e3 + 50
    assert row["e2e.queued_us"] == pytest.approx(first_us + again_us)
    assert row["e2e.connector_us"] == pytest.approx(2 * (5 + 20))
    assert row["tpot_us"] is None


def test_kv_that_never_came_was_waited_for_until_the_end(server):
    server.step()
    ended = {"finished_ns": FIRST_NS + 900_000, "finish_reason": "abort"}
    server.request(kv_wait_ns=[FIRST_NS + 100_000], **ended)
    row = read_row(server)
    assert (row["e2e.queued_us"], row["e2e.kv_wait_us"]) == (100, 800)
