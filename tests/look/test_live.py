# SPDX-License-Identifier: Apache-2.0
"""Who watches sees what was recorded since, once, whatever happens to the files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtax.look.live import Watched
from kvtax.look.prometheus import Collector, serve
from kvtax.paths import REPOSITORY
from tests.look.conftest import main
from tests.look.made_up_server import FIRST_NS, Server, served

METHOD = "worker.get_finished"


def truth_us(server: Server) -> float:
    return sum(step["connector_self_us"]["get_finished"] for step in server.workers)


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


def test_an_instance_that_starts_later_is_found(tmp_path):
    watched = Watched(tmp_path)
    assert watched.read() == {}
    served(tmp_path / "late", steps=20).write()
    assert watched.read()["late"].steps == 20


def test_what_cannot_be_is_counted_and_in_no_sum(tmp_path):
    server = served(tmp_path / "records", steps=20)
    path = server.write() / "engine_step.jsonl"
    before = Watched(server.folder).read()["records"]
    bad = (
        b'{"step_id":1,"t_ns":-5}',
        b'{"step_id":1,"t_ns":%d}' % 2**63,
        b'{"step_id":1,"t_ns":5,"step_us":1e300}',
        b'{"step_id":1,"t_ns":5,"step_us":-7}',
        b'{"step_id":1,"t_ns":5,"connector_self_us":{"x":1e308}}',
        b"{",
        b"\xff",
        b"\0" * 100,
    )
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in bad)
    after = Watched(server.folder).read()["records"]
    assert (after.bad_lines, after.steps) == (len(bad), 20)
    assert after.by_method_us == before.by_method_us
    assert after.covered_us == before.covered_us


@pytest.mark.parametrize(
    "field", ["running", "cache_size", "prefill_tokens", "connector_calls"]
)
@pytest.mark.parametrize("number", [10**400, -1])
def test_a_count_that_cannot_be_stops_no_scrape(tmp_path, field, number):
    server = served(tmp_path / "records", steps=20)
    value = {"x": number} if field == "connector_calls" else number
    path = server.write() / "engine_step.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step_id": 20, "t_ns": FIRST_NS, field: value}) + "\n")
    watched = Watched(server.folder)
    for _ in range(2):
        families = {family.name: family for family in Collector(watched).collect()}
        (bad,) = families["kvtax:bad_record_lines"].samples
        assert bad.value == 1
        registry = CollectorRegistry()
        registry.register(Collector(watched))
        assert generate_latest(registry)


def test_a_file_that_cannot_be_read_is_named_once_and_hides_no_other(tmp_path, capsys):
    server = served(tmp_path / "records" / "one", steps=20)
    server.write()
    other = served(tmp_path / "records" / "two", steps=20).write()
    (server.folder / "worker_step.r0.jsonl").unlink()
    (server.folder / "worker_step.r0.jsonl").mkdir()
    watched = Watched(tmp_path / "records")
    for _ in range(2):
        totals = watched.read()
        assert totals["one"].steps == totals["two"].steps == 20
        assert totals[other.name].by_method_us[METHOD] > 0
    path = server.folder / "worker_step.r0.jsonl"
    assert capsys.readouterr().err == f"{path}: Is a directory; it is left out\n"


def test_a_life_that_is_removed_is_let_go_of(tmp_path):
    """Its numbers, and its files, which would keep the disk full."""
    server = served(tmp_path / "one", steps=20)
    for folder in (server.write(), served(tmp_path / "two", steps=20).write()):
        assert folder.is_dir()
    watched = Watched(tmp_path)
    assert set(watched.read()) == {"one", "two"}
    shutil.rmtree(server.folder)
    assert set(watched.read()) == {"two"}
    links = Path("/proc/self/fd").iterdir()
    held = [os.readlink(link) for link in links if link.is_file()]
    assert not [path for path in held if path.startswith(str(server.folder))]
    server.write()
    assert watched.read()["one"].steps == 20


@pytest.mark.slow
def test_a_restarted_engine_keeps_its_series_and_a_dead_one_has_no_gauge(tmp_path):
    """Two hundred restarts add nothing; gauges are of the life that writes now."""
    series = set()
    watched = Watched(tmp_path)
    for number in range(200):
        life = f"20261128T{number // 60:02}{number % 60:02}00.000000Z-vm-dp0-{number}"
        served(tmp_path / life, steps=3).write()
        if number % 50 == 49:
            (totals,) = watched.read().values()
            series.add(len(generate_latest(registry_of(watched)).splitlines()))
            assert totals.steps == 3 * (number + 1)
            assert totals.present is not None
    assert len(series) == 1
    assert set(watched.read()) == {"vm-dp0"}
    for life in tmp_path.iterdir():
        for path in life.iterdir():
            os.utime(path, (1, 1))
    assert watched.read()["vm-dp0"].present is None
    text = generate_latest(registry_of(watched)).decode()
    assert "kvtax:num_requests_running{" not in text
    assert 'kvtax:step_seconds_count{instance_name="vm-dp0"} 600.0' in text


def test_a_gauge_that_was_not_recorded_has_no_sample(tmp_path):
    server = served(tmp_path / "records", steps=3)
    for step in server.steps:
        del step["running"], step["cache_size"]
    text = generate_latest(registry_of(Watched(server.write()))).decode()
    assert "kvtax:num_requests_running{" not in text
    assert "kvtax:cached_blocks{" not in text
    assert "kvtax:num_requests_waiting{" in text


def registry_of(watched: Watched) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Collector(watched))
    return registry


def test_the_first_scrape_reads_no_more_than_it_has_time_for(tmp_path, monkeypatch):
    """What comes later counts, and the gauges are those of the last step."""
    server = served(tmp_path / "records", steps=400)
    path = server.write() / "engine_step.jsonl"
    monkeypatch.setattr("kvtax.look.live.MOST_AT_START", 1_000)
    watched = Watched(server.folder)
    totals = watched.read()["records"]
    assert totals.steps == 1
    assert totals.present.cache_blocks == server.steps[-1]["cache_size"]
    line = path.read_bytes().splitlines(keepends=True)[-1]
    with path.open("ab") as file:
        file.write(10 * line)
    assert watched.read()["records"].steps == 11


def test_a_line_that_is_deeper_than_any_record_is_a_bad_one(tmp_path):
    server = served(tmp_path / "records", steps=20)
    with (server.write() / "engine_step.jsonl").open("a") as file:
        file.write("[" * 200_000 + "\n")
    totals = Watched(server.folder).read()["records"]
    assert (totals.steps, totals.bad_lines) == (20, 1)


@contextmanager
def served_metrics(folder: Path) -> Iterator[str]:
    """Serve what is recorded in a folder; the URL."""
    http = serve(Watched(folder), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{http.server_port}/metrics"
    finally:
        http.shutdown()


def scraped(url: str) -> dict[tuple, float]:
    text = urllib.request.urlopen(url, timeout=120).read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_prometheus_gets_the_same_sums(tmp_path):
    server = served(tmp_path / "records", steps=80)
    with served_metrics(server.write()) as url:
        families = scraped(url)
    name = ("instance_name", "records")
    key = ("kvtax:connector_method_seconds_total", name, ("method", METHOD))
    assert families[key] == pytest.approx(truth_us(server) / 1e6)
    step_us = [step["step_us"] for step in server.steps]
    assert families["kvtax:step_seconds_count", name] == 80
    assert families["kvtax:step_seconds_sum", name] == pytest.approx(sum(step_us) / 1e6)
    ended = ("kvtax:requests_ended_total", ("finished_reason", "length"), name)
    assert families[ended] == len(server.requests)
    below = sum(us <= 5_000 for us in step_us)
    assert families["kvtax:step_seconds_bucket", name, ("le", "0.005")] == below
    assert families["kvtax:cached_blocks", name] == server.steps[-1]["cache_size"]


@pytest.mark.slow
def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path):
    with served_metrics(served(tmp_path / "records", steps=30).write()) as url:
        there = {key[0] for key in scraped(url)}
    board = json.loads((REPOSITORY / "kvtax" / "look" / "grafana.json").read_text())
    asked = {name for text in texts(board) for name in re.findall(r"kvtax:\w+", text)}
    assert len(asked) > 8
    assert asked <= there


def texts(value) -> Iterator[str]:
    """Yield all strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts(inner)


@pytest.mark.slow
def test_scrapers_at_the_same_moment_get_each_record_once(tmp_path):
    """As an HA pair of Prometheus does."""
    server = served(tmp_path / "records", steps=8_000)
    whole = (server.write() / "engine_step.jsonl").read_bytes().splitlines(True)
    growing = server.folder / "engine_step.jsonl"
    growing.write_bytes(b"".join(whole[:1]))
    name = ("instance_name", "records")
    with served_metrics(server.folder) as url:
        for end in range(1_001, len(whole) + 1, 1_000):
            growing.write_bytes(b"".join(whole[:end]))
            with ThreadPoolExecutor(6) as pool:
                pages = list(pool.map(scraped, [url] * 6))
            counts = {page["kvtax:step_seconds_count", name] for page in pages}
            assert counts == {end - 1}
            assert {page["kvtax:bad_record_lines_total", name] for page in pages} == {0}


def test_what_was_written_before_a_file_was_begun_anew_is_read(tmp_path):
    server = served(tmp_path / "records", steps=50)
    path = server.write() / "engine_step.jsonl"
    head, *lines = path.read_bytes().splitlines(True)
    path.write_bytes(head + b"".join(lines[:10]))
    watched = Watched(server.folder)
    assert watched.read()["records"].steps == 10
    with path.open("ab") as file:
        file.writelines(lines[10:30])
    os.replace(path, f"{path}.1")
    path.write_bytes(head + b"".join(lines[30:]))
    assert watched.read()["records"].steps == 50


def test_overlapping_steps_cover_their_time_once(tmp_path):
    server = Server(tmp_path / "records")
    for _ in range(100):
        server.step(model_us=9_815, build_meta_us=500, get_finished_us=0)
    for step in server.steps:
        step["t_ns"] = FIRST_NS + 5_000_000 * step["step_id"]
    totals = Watched(server.write()).read()["records"]
    assert totals.covered_us == pytest.approx(99 * 5_000 + 9_980)


@pytest.mark.slow
def test_a_connector_that_was_not_timed_has_no_metric(tmp_path):
    server = served(tmp_path / "records", steps=30)
    with served_metrics(server.without_calls().write()) as url:
        page = scraped(url)
    parts = [dict(key[1:]).get("part") for key in page if "step_part" in key[0]]
    assert sorted(filter(None, parts)) == ["model", "scheduler"]


@pytest.mark.parametrize(
    "address", ["9109", "localhost:", "127.0.0.1:http", "[::1:9109", "::1", "a:b:1"]
)
def test_a_wrong_address_says_what_is_wanted(tmp_path, address, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--prometheus", address])
    assert "HOST:PORT expected" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "::1:0"])
def test_the_address_that_is_printed_can_be_scraped(tmp_path, address):
    folder = served(tmp_path / "records", steps=20).write()
    with watching(folder, address) as process:
        url = re.search(r"http://\S+/metrics", process.stdout.readline())[0]
        assert scraped(url)["kvtax:step_seconds_count", ("instance_name", "records")]


@contextmanager
def watching(folder: Path, address: str) -> Iterator[subprocess.Popen]:
    """A command that serves what is recorded in a folder."""
    command = [sys.executable, "-m", "kvtax", "look", str(folder)]
    with subprocess.Popen(
        [*command, "--prometheus", address],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watching_ends_at_once_with_a_signal(tmp_path: Path, number):
    folder = served(tmp_path / "records", steps=20).write()
    with watching(folder, "127.0.0.1:0") as process:
        assert process.stdout.readline().startswith("watching")
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
