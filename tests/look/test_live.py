# SPDX-License-Identifier: Apache-2.0
"""Who watches sees what was recorded since, once, whatever happens to the files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from made_up_server import Server, served
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from lab.paths import REPOSITORY
from look.follow import follow, spark, view
from look.live import Totals, Watched
from look.prometheus import serve

METHOD = "worker.get_finished"


def truth_us(server: Server) -> float:
    return sum(one["connector_self_us"]["get_finished"] for one in server.workers)


def test_each_record_counts_once_however_often_one_looks(tmp_path):
    server = served(tmp_path / "records", steps=100)
    whole = (server.write() / "worker_step.r0.jsonl").read_bytes()
    growing = server.folder / "worker_step.r0.jsonl"
    watched = Watched(server.folder)
    for cut in (10, 500, 5_000, 5_001, len(whole) - 3, len(whole), len(whole)):
        growing.write_bytes(whole[:cut])
        totals = watched.read()["records"]
    assert totals.by_method_us[METHOD] == pytest.approx(truth_us(server))
    assert totals.calls[METHOD] == totals.steps == 100
    assert totals.bad_lines == 0


def test_a_file_that_is_begun_anew_is_read_from_its_start(tmp_path):
    server = served(tmp_path / "records", steps=50)
    path = server.write() / "engine_step.jsonl"
    watched = Watched(server.folder)
    assert watched.read()["records"].steps == 50
    content = path.read_bytes()
    os.replace(path, f"{path}.1")
    path.write_bytes(content)
    assert watched.read()["records"].steps == 100


def test_an_instance_that_starts_later_is_found(tmp_path):
    watched = Watched(tmp_path)
    assert watched.read() == {}
    served(tmp_path / "late", steps=20).write()
    assert watched.read()["late"].steps == 20


def test_a_line_that_is_no_record_is_counted(tmp_path):
    server = served(tmp_path / "records", steps=20)
    with (server.write() / "engine_step.jsonl").open("a") as file:
        file.write("{\n")
    assert Watched(server.folder).read()["records"].bad_lines == 1


def test_what_is_shown_is_of_the_last_second(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("look.follow.EVERY_S", 0.01)
    folder = served(tmp_path / "records", steps=100).write()
    follow(Watched(folder), seconds=0.05)
    shown = capsys.readouterr().out
    # All was there before the first look.
    assert "records: 0 steps/s" in shown
    assert METHOD in shown


def test_of_the_requests_that_ended_since_the_longest_are_shown(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("look.follow.EVERY_S", 0.01)
    server = served(tmp_path / "records", steps=100)
    folder = server.write()
    path = folder / "engine_request.jsonl"
    whole = path.read_text()
    path.write_text(whole.partition("\n")[0] + "\n")
    watched = Watched(folder)
    watched.read()
    path.write_text(whole)
    told = watched.read()["records"].minus(Totals())
    assert len(told["ended"]) == len(server.requests)
    lengths = {
        one["id"]: (one["finished_ns"] - one["arrival_ns"]) / 1e6
        for one in server.requests
    }
    longest = max(lengths, key=lengths.__getitem__)
    Console().print(view("records", told, []))
    shown = capsys.readouterr().out
    assert longest in shown
    assert sum(name in shown for name in lengths) == 3


def test_the_highest_value_has_the_highest_bar():
    assert spark([0, 1, 2]) == "▁▅█" or spark([0, 1, 2]) == "▁▄█"
    assert spark([0, 0]) == "▁▁"
    assert spark([]) == ""


def scraped(url: str) -> dict[tuple, float]:
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_gets_the_same_sums(tmp_path):
    server = served(tmp_path / "records", steps=80)
    http = serve(Watched(server.write()), "127.0.0.1:0")
    try:
        found = scraped(f"http://127.0.0.1:{http.server_port}/metrics")
    finally:
        http.shutdown()
    name = ("instance_name", "records")
    key = ("kvtax:connector_method_seconds_total", name, ("method", METHOD))
    assert found[key] == pytest.approx(truth_us(server) / 1e6)
    step_us = [step["step_us"] for step in server.steps]
    assert found["kvtax:step_seconds_count", name] == 80
    assert found["kvtax:step_seconds_sum", name] == pytest.approx(sum(step_us) / 1e6)
    ended = ("kvtax:requests_ended_total", ("finished_reason", "length"), name)
    assert found[ended] == len(server.requests)
    below = sum(us <= 5_000 for us in step_us)
    assert found["kvtax:step_seconds_bucket", name, ("le", "0.005")] == below
    assert found["kvtax:cached_blocks", name] == server.steps[-1]["cache_size"]


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path):
    http = serve(Watched(served(tmp_path / "records", steps=30).write()), "127.0.0.1:0")
    try:
        there = {key[0] for key in scraped(f"http://127.0.0.1:{http.server_port}/")}
    finally:
        http.shutdown()
    board = json.loads((REPOSITORY / "look" / "grafana.json").read_text())
    asked = " ".join(
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    )
    named = {word for word in there if word in asked}
    words = {
        part.partition("{")[0].rpartition("(")[2]
        for part in asked.replace(" ", "\n").splitlines()
        if "kvtax:" in part
    }
    assert words
    assert words <= named


@pytest.mark.parametrize("address", ["9109", "localhost:", "127.0.0.1:http"])
def test_a_wrong_address_says_what_is_wanted(tmp_path, address):
    with pytest.raises(ValueError, match="want HOST:PORT"):
        serve(Watched(tmp_path), address)


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--follow"], ["--prometheus", "127.0.0.1:0"]])
def test_watching_ends_at_once_with_ctrl_c(tmp_path: Path, how):
    folder = served(tmp_path / "records", steps=20).write()
    process = subprocess.Popen(
        [sys.executable, "-m", "look", str(folder), *how],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("watching")
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in errors
