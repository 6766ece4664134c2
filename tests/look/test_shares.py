# SPDX-License-Identifier: Apache-2.0
"""Figures of `kvtax look` against the same figures computed line by line."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from kvtax.look import instances
from kvtax.look.discover import common_clock, discover
from kvtax.look.instance_summary import Cost, cost, felt, parts_of_requests
from kvtax.look.instances import read_instances
from kvtax.look.requests import TIMED_PARTS, WAITS
from kvtax.look.time_line import time_line
from kvtax.records.parts import LONGEST_LINE
from tests.look.by_line import figures
from tests.look.conftest import main, only
from tests.look.made_up_server import Server, served


def cost_of(folder: Path) -> Cost:
    computed = cost(only(folder))
    assert computed is not None
    return computed


def test_a_request_in_steps_without_a_worker_has_no_share_of_the_connector(tmp_path):
    server = served(tmp_path / "records")
    server.workers = server.workers[200:]
    requests = only(server.write()).requests
    unknown = requests.filter(pl.col("first_step") < 190)
    assert unknown.height > 5
    assert unknown["e2e.connector_us"].null_count() == unknown.height
    known = requests.filter(pl.col("first_step") >= 200)
    assert known.height > 2
    assert known["e2e.connector_us"].null_count() == 0
    for shares in parts_of_requests(requests).values():
        assert all(0 <= share <= 1 for share in shares.values())


HANDSHAKE = "set_xfer_handshake_metadata"


@pytest.mark.slow
@pytest.mark.parametrize("call", [HANDSHAKE, "a_method_of_its_own"])
def test_calls_before_the_first_step_are_in_no_share(tmp_path, capsys, call):
    server = served(tmp_path / "records")
    server.requests[0] |= {"first_step": 0, "preemptions": 0}
    server.requests[0].pop("preempted_steps", None)
    server.requests[0]["arrival_ns"] = server.steps[0]["t_ns"] - 1_000
    server.requests[0].pop("kv_wait_ns", None)
    before = cost_of(server.write())
    for field, value in (("connector_self_us", 24_061.7), ("connector_calls", 1)):
        server.steps[0][field] |= {call: value}
    after = cost_of(server.write())
    assert after.connector.share == pytest.approx(before.connector.share)
    assert after.connector.most_us == before.connector.most_us
    assert after.at_start_us == {f"scheduler.{call}": pytest.approx(24_061.7)}
    requests = only(server.folder).requests
    assert felt(requests)["ttft"].p99 < 1
    assert requests["e2e.other_us"].min() >= 0
    assert main([str(server.folder), "--out", str(tmp_path / "page.html")]) == 0
    assert f"before the first step, in no share: scheduler.{call} 24.1 ms" in (
        capsys.readouterr().out.replace("\n", " ")
    )


def test_calls_between_two_steps_are_in_no_share(tmp_path):
    server = served(tmp_path / "records")
    before = cost_of(server.write())
    server.steps[390]["connector_self_us"]["request_finished"] = 50_000.0
    after = cost_of(server.write())
    assert after.connector.share == pytest.approx(before.connector.share)
    assert after.between_us == {"scheduler.request_finished": pytest.approx(50_000)}


@pytest.mark.slow
def test_a_call_of_each_of_many_methods_is_looked_for_outside_once(
    tmp_path, monkeypatch
):
    looks = []

    def counted(steps: pl.DataFrame, side: str):
        looks.append(side)
        return excess_us(steps, side)

    excess_us = instances._excess_us
    monkeypatch.setattr(instances, "_excess_us", counted)
    server = served(tmp_path / "records")
    for number, step in enumerate(server.steps[:40]):
        step["connector_self_us"][f"method_{number}"] = 0.1
    cost_of(server.write())
    assert len(looks) <= 8


def of_ranks(server: Server, kind: str) -> Path:
    """Two workers: ranks of a tensor group, stages that name it, or that take turns."""
    folder = server.write()
    path = folder / "worker_step.r0.jsonl"
    header, *lines = map(json.loads, path.read_text().splitlines())
    for rank in range(2):
        workers = []
        for line in lines:
            us = line["execute_model_us"] / 2
            if kind == "ranks":  # they are the slowest in turns
                us *= 1 + 0.01 * ((line["step_id"] + rank) % 2)
            finished_us = line["connector_self_us"]["get_finished"] / (rank + 2)
            moved_us = rank * us if kind == "in turns" else 0
            workers.append(
                line
                | {
                    "t_ns": line["t_ns"] + round(moved_us * 1e3) + rank,
                    "execute_model_us": us * (2 if rank and kind == "stages" else 1),
                    "connector_self_us": {"get_finished": finished_us},
                }
            )
        stage = {"stage": rank} if kind == "stages" else {}
        texts = [json.dumps(line) + "\n" for line in (header | stage, *workers)]
        path.with_name(f"worker_step.r{rank}.jsonl").write_text("".join(texts))
    return folder


@pytest.mark.parametrize("kind", ["stages", "in turns"])
def test_stages_of_a_pipeline_add_up(tmp_path, kind):
    folder = of_ranks(served(tmp_path / "records"), kind)
    computed = cost_of(folder)
    expected = figures(folder, is_pipeline=True)
    assert computed.connector.share == pytest.approx(expected.share)
    # A stage that waited for the one before counts the wait once.
    whole = cost_of(served(tmp_path / "one").write())
    model_us = sum(part.mean_us for part in computed.parts if part.name == "model")
    calls_us = sum(part.mean_us for part in computed.methods if "worker" in part.name)
    one_us = sum(part.mean_us for part in whole.parts if part.name == "model")
    finished_us = sum(part.mean_us for part in whole.methods if "worker" in part.name)
    assert model_us + calls_us == pytest.approx(one_us + finished_us, rel=1e-4)


def half_overlapping(server: Server) -> None:
    """Begin each step in the middle of the one before, as asynchronous scheduling."""
    now_ns = server.steps[0]["t_ns"]
    moved_ns = []
    for step, worker in zip(server.steps, server.workers, strict=True):
        moved_ns.append(now_ns - step["t_ns"])
        worker["t_ns"] += moved_ns[-1]
        step["t_ns"] = now_ns
        now_ns += round(step["step_us"] * 500)
    for request in server.requests:
        by_ns = moved_ns[request["first_step"]]
        request["arrival_ns"] += by_ns
        request["finished_ns"] += moved_ns[request["last_step"]]
        if "kv_wait_ns" in request:
            request["kv_wait_ns"] = [at_ns + by_ns for at_ns in request["kv_wait_ns"]]


@pytest.mark.parametrize("longest", ["model", "connector"])
def test_where_steps_overlap_no_share_is_over_100_percent(tmp_path, capsys, longest):
    server = served(tmp_path / "records")
    half_overlapping(server)
    if longest == "connector":
        for worker in server.workers:
            worker["connector_self_us"] = {"get_finished": worker["execute_model_us"]}
    instance = only(server.write())
    requests = instance.requests
    assert requests.height == 50
    for span in ("ttft", "e2e"):
        parts_us = [requests[f"{span}.{part}"] for part in (*WAITS, *TIMED_PARTS)]
        parts_us.append(requests[f"{span}.other_us"])
        assert min(us.min() for us in parts_us) >= 0
        assert sum(parts_us).to_list() == pytest.approx(requests[f"{span}_us"])
        methods_us = sum(requests[f"{span}.{name}"] for name in instance.methods)
        assert methods_us.to_list() == pytest.approx(requests[f"{span}.connector_us"])
    assert main([str(server.folder)]) == 0
    shares = re.findall(r"(\d+\.\d+)%", capsys.readouterr().out)
    assert len(shares) > 10
    assert max(map(float, shares)) <= 100


@pytest.mark.parametrize("workers", ["one", "ranks", "stages", "two engines"])
@pytest.mark.parametrize("kept", [slice(200, None), slice(None, 200), slice(None)])
@pytest.mark.parametrize("is_async", [False, True])
def test_figures_are_those_of_a_sum_over_the_lines(tmp_path, workers, kept, is_async):
    """Whatever is missing, overlaps, or was called before the first step."""
    folder = tmp_path / "records"
    for seed in range(2 if workers == "two engines" else 1):
        server = served(folder / f"life{seed}", seed=seed)
        server.header["life"] = f"life{seed}"
        server.requests = []
        if is_async:
            half_overlapping(server)
        server.workers = server.workers[kept]
        for of, name in (
            (server.steps, HANDSHAKE),
            (server.workers, "register_kv_caches"),
        ):
            of[0]["connector_self_us"] |= {name: 90_000.0}
            of[0]["connector_calls"] |= {name: 1}
        if workers in ("ranks", "stages"):
            of_ranks(server, workers)
        else:
            server.write()
    instances, _ = read_instances(folder)
    assert len(instances) == seed + 1
    for instance in instances:
        expected, computed = figures(folder / instance.name), cost(instance)
        assert computed.steps == expected.steps
        assert computed.worker_steps == expected.worker_steps
        assert computed.step.mean_us == pytest.approx(expected.step_us, rel=1e-5)
        # What overlaps at the two ends of a recording is not known.
        assert computed.connector.share == pytest.approx(expected.share, rel=0.01)
        timed = [part for part in computed.methods if part.mean_us]
        calls = {part.calls_per_step for part in timed}
        assert calls == ({1, 2} if workers == "stages" else {1})
        means_us = {part.name: part.mean_us for part in timed}
        assert means_us == pytest.approx(expected.methods_us, rel=1e-4)
        assert f"scheduler.{HANDSHAKE}" in computed.at_start_us


def test_no_part_of_a_step_that_is_shorter_than_its_worker_s_record_is_negative(
    tmp_path, capsys
):
    server = served(tmp_path / "records")
    for worker in server.workers[::2]:
        worker["execute_model_us"] *= 2
    assert main([str(server.write())]) == 0
    shown = capsys.readouterr().out
    (other,) = (line for line in shown.splitlines() if line.startswith("  other "))
    assert "-" not in other
    clock = common_clock(discover(server.folder)[0])
    line = time_line(only(server.folder), clock, 50, 50)
    for parts in (line.parts, line.slowest_parts):
        known_us = [us for of in parts.values() for us in of if us is not None]
        assert len(known_us) > 100
        assert min(known_us) >= 0


def test_a_life_that_was_copied_counts_once(tmp_path, capsys):
    server = served(tmp_path / "records" / "one")
    server.header["life"] = "20261127T202243.759269Z-vm-dp0-30874"
    shutil.copytree(server.write(), tmp_path / "records" / "two")
    (source,), (warning,) = discover(tmp_path / "records")
    assert (source.name, warning.place) == ("one", "two")
    assert "a copy of one" in warning.message


def test_a_colliding_line_hides_nothing_else(records, tmp_path, capsys):
    with (records / "engine_step.jsonl").open("a") as file:
        file.write('{"step_id": 48, "t_ns": 1, "step_us": 1}\n')
    assert main([str(records), "--out", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr().out
    assert "400 steps" in shown
    assert "1 steps are in the file twice, as step_id 48" in shown


@pytest.mark.slow
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("at", [-1, 20])
@pytest.mark.parametrize("file", ["engine_step", "worker_step.r0", "engine_request"])
def test_a_hole_in_a_file_is_a_bad_line(records, file, at, end):
    path = records / f"{file}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    hole = b"\0" * (2 * LONGEST_LINE + 5) + (end if at < 0 else b"\n")
    lines.insert(at if at > 0 else len(lines), hole)
    path.write_bytes(b"".join(lines))
    instance = only(records)
    assert instance.steps.height == 400
    assert instance.requests.height == 50
    assert {"torn_lines", "bad_lines"} & {warning.kind for warning in instance.warnings}


@pytest.mark.slow
def test_gigabytes_of_blanks_in_a_packed_file_are_refused_by_name(records):
    path = records / "engine_step.jsonl"
    with gzip.open(f"{path}.gz", "wb", compresslevel=1) as file:
        file.write(path.read_bytes())
        for _ in range(600):
            file.write(b" " * 1_000_000)
    path.unlink()
    instances, (refused,) = read_instances(records)
    assert instances == [] and "over 200 times its size" in str(refused)


def test_an_inverted_window_is_refused(records, tmp_path, capsys):
    trace = tmp_path / "trace"
    options = ["--perfetto", str(trace), "--from-s", "100", "--to-s", "90"]
    assert main([str(records), *options]) == 2
    assert "--from-s 100 is after --to-s 90" in capsys.readouterr().err
    assert not trace.exists()


@pytest.mark.parametrize("option", ["--out", "--perfetto"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    records, tmp_path, capsys, option
):
    assert main([str(records), option, str(tmp_path / "nowhere" / "file")]) == 2
    shown = capsys.readouterr()
    assert f"name another file with {option}" in shown.err
    assert "steps" not in shown.out


def test_a_file_of_records_is_no_folder_of_them(tmp_path, capsys):
    Server(tmp_path / "records").write()
    assert main([str(tmp_path / "records" / "engine_step.jsonl")]) == 2
    assert "name their folder" in capsys.readouterr().err
