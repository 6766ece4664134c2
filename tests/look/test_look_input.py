# SPDX-License-Identifier: Apache-2.0
"""What is wrong with records is named and counted, and the rest is still shown."""

from __future__ import annotations

import itertools
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from kvtax.look.instances import read_instances
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from tests.look.conftest import main, only, page_data
from tests.look.made_up_server import FIRST_NS, Server, served

# Columns of the table of a step as far as its means, which are always shown.
MEANS_WIDTH = 53


def look(folder, tmp_path, capsys) -> tuple[int, str, str]:
    """Exit status, what was printed, and the page."""
    page = tmp_path / "page.html"
    status = main([str(folder), "--out", str(page)])
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    return status, printed, page.read_text() if page.exists() else ""


def test_a_folder_without_records_says_how_they_are_made(tmp_path, capsys):
    status, printed, _ = look(tmp_path, tmp_path, capsys)
    assert status == 2
    assert "KVTAX_STEP_RECORDS_DIR" in printed
    with pytest.raises(RecordsError, match="no such directory"):
        read_instances(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["engine_step", "worker_step", "engine_request"])
def test_a_torn_last_line_is_counted(records, tmp_path, capsys, kind):
    (path,) = records.glob(f"{kind}*")
    with path.open("a") as out:
        out.write('{"step_id": 40')
    status, printed, page = look(records, tmp_path, capsys)
    assert status == 0
    assert f"{kind}" in printed and "torn last line" in printed
    assert f"/{kind}" in page and "torn last line" in page


def test_another_schema_is_named_and_the_others_are_shown(records, tmp_path, capsys):
    served(records / "second").write()
    path = records / "engine_step.jsonl"
    path.write_text(path.read_text().replace("engine_step/1", "engine_step/9", 1))
    status, printed, _ = look(records, tmp_path, capsys)
    assert status == 2
    assert "kvtax.engine_step/9" in printed
    assert "second: vLLM 0.18.1, 400 steps" in printed


def test_several_releases_in_one_folder_are_told(tmp_path, capsys):
    for release in ("0.18.1", "0.32.0"):
        server = served(tmp_path / "records" / release)
        server.release = release
        server.write()
    status, printed, _ = look(tmp_path / "records", tmp_path, capsys)
    assert status == 0
    assert "different vLLM releases: 0.18.1, 0.32.0" in printed


def test_without_a_worker_its_time_is_other_and_that_is_told(records, tmp_path, capsys):
    (records / "worker_step.r0.jsonl").unlink()
    status, printed, _ = look(records, tmp_path, capsys)
    assert status == 0
    assert "no records of a worker" in printed
    instance = only(records)
    assert instance.steps["model_us"].sum() == 0
    assert instance.steps["other_us"].min() > 1_000


def test_a_worker_that_stopped_early_is_told(records, tmp_path, capsys):
    path = records / "worker_step.r0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:200]))
    _, printed, _ = look(records, tmp_path, capsys)
    assert "201 of 400 steps have no record of a worker" in printed


def test_no_steps_at_all_is_no_error(server, tmp_path, capsys):
    status, printed, page = look(server.write(), tmp_path, capsys)
    assert status == 0
    assert "no engine step has ended" in printed
    assert "no steps" in page


def test_steps_that_never_ended_are_counted(records, tmp_path, capsys):
    with (records / "engine_step.jsonl").open("a") as out:
        out.write(json.dumps({"step_id": 400, "t_ns": FIRST_NS * 2}) + "\n")
    _, printed, _ = look(records, tmp_path, capsys)
    assert "1 steps were scheduled and never ended" in printed


@pytest.mark.parametrize("jump_ns", [-(10**12), 10**17])
def test_a_clock_that_jumps_is_counted_and_the_longest_stretch_kept(
    tmp_path, capsys, jump_ns
):
    server = served(tmp_path / "records")
    server.requests.clear()
    server.steps[100]["t_ns"] += jump_ns
    _, printed, _ = look(server.write(), tmp_path, capsys)
    assert "the clock jumped: 10" in printed
    instance = only(server.folder)
    assert instance.steps["t_ns"].is_sorted()
    assert instance.steps.height >= 299


def test_records_without_step_timing_v2_are_still_shown(tmp_path, capsys):
    server = served(tmp_path / "records", steps=2_100)
    for step in server.steps:
        for name in ("cache_size", "free_blocks", "update_us", "preemptions"):
            del step[name]
    status, printed, _ = look(server.write(), tmp_path, capsys)
    assert status == 0
    assert "records without |cache|" in printed
    (line,) = [line for line in printed.splitlines() if "1,000 cached blocks" in line]
    assert "not recorded" in line


def test_two_servers_stand_side_by_side(tmp_path, capsys):
    for name, us in (("before", 20), ("after", 400)):
        server = Server(tmp_path / "records" / name)
        for _ in range(400):
            server.step(get_finished_us=us)
        server.write()
    look(tmp_path / "records", tmp_path, capsys)
    data = page_data(tmp_path / "page.html")
    assert data["answer"][0].startswith("**after.** The connector adds")
    bars = data["sections"][0]
    assert [bar["name"] for bar in bars["bars"]] == ["after", "before"]
    instances, _ = read_instances(tmp_path / "records")
    steps_of = {instance.name: instance.steps for instance in instances}
    for bar in bars["bars"]:
        steps = steps_of[bar["name"]]
        for part, us in zip(bars["parts"], bar["values"], strict=True):
            column = "other_us" if part == "the rest" else f"{part}_us"
            assert us == pytest.approx(steps[column].mean(), abs=0.1)
        assert sum(bar["values"]) == pytest.approx(steps["step_us"].mean(), abs=0.1)


@pytest.mark.slow
def test_equal_servers_are_one_card_and_another_is_shown(tmp_path, capsys):
    for rank in range(32):
        server = Server(tmp_path / "records" / f"dp{rank}")
        for _ in range(60):
            server.step(get_finished_us=400 if rank == 17 else 20)
        server.write()
    _, out, page = look(tmp_path / "records", tmp_path, capsys)
    assert "31 equal servers: dp0, dp1, dp2 and 28 more" in out
    assert out.startswith("dp17. The connector adds 405.0")
    assert len(out.splitlines()) < 30
    names = [
        bar["name"] for bar in page_data(tmp_path / "page.html")["sections"][0]["bars"]
    ]
    assert names[0] == "dp17" and len(names) == 2
    assert len(page) < 1_500_000


def test_sampled_steps_say_so_and_split_no_request(tmp_path, capsys):
    server = served(tmp_path / "records")
    server.header["every"] = 10
    server.steps, server.workers = server.steps[::10], server.workers[::10]
    status, printed, _ = look(server.write(), tmp_path, capsys)
    assert status == 0
    assert "40 steps, one in 10, in" in printed
    assert "one step in 10 was recorded" in printed
    assert "waited most" not in printed


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred \u202egnp.exe \x9b5n \u2028 a\tb"


def test_control_characters_in_names_are_shown_and_not_obeyed(tmp_path, capsys):
    server = served(tmp_path / "records")
    for request in server.requests:
        request["id"] = HOSTILE
    for record in server.workers:
        for name in ("connector_calls", "connector_us", "connector_self_us"):
            record[name] = {HOSTILE: record[name]["get_finished"]}
    server.release = HOSTILE
    folder = server.write()
    path = folder / "worker_step.r0.jsonl"
    name = json.dumps(HOSTILE)
    path.write_text(path.read_text().replace('"get_finished"', name, 1))
    (folder / HOSTILE).mkdir()
    (folder / HOSTILE / "requests.jsonl").write_text("{")
    assert main([str(folder), "--out", str(tmp_path / "page.html")]) == 2
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in printed
    assert "\\u202egnp.exe" in printed
    obeyed = set(printed) - {"\n"}
    assert not [c for c in obeyed if not c.isprintable()]


def test_the_page_lies_beside_the_records_and_no_other_is_overwritten(
    records, tmp_path, capsys, monkeypatch
):
    committed = tmp_path / "checkout" / "report.html"
    committed.parent.mkdir()
    committed.write_text("committed")
    (records / "report.html").write_text("of the sweep")
    monkeypatch.chdir(committed.parent)
    assert main([str(records)]) == 0
    assert f"wrote {records / 'look.html'}" in capsys.readouterr().out
    assert (records / "look.html").read_text().startswith("<!doctype html>")
    assert committed.read_text() == "committed"
    assert (records / "report.html").read_text() == "of the sweep"
    assert [path.name for path in committed.parent.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_says_what_to_do(records, capsys):
    (records / "look.html").mkdir()
    assert main([str(records)]) == 2
    captured = capsys.readouterr()
    assert "400 steps" in captured.out
    assert "name another file with --out" in captured.err


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 200])
def test_tables_are_as_wide_as_the_terminal(tmp_path, columns):
    folder = served(tmp_path / "records").write()
    command = [sys.executable, "-m", "kvtax", "look", str(folder)]
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": str(columns)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=theirs) as look:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # Linux: nothing more to read
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    assert look.returncode == 0
    shown_lines = shown.decode().splitlines()
    first = next(i for i, line in enumerate(shown_lines) if line.startswith("us per"))
    head, *rows = itertools.takewhile(
        lambda line: not line.startswith("("), shown_lines[first:]
    )
    assert max(map(len, [head, *rows])) <= max(columns, MEANS_WIDTH)
    assert "mean" in head
    assert ("calls" in head) is (columns == 200)
