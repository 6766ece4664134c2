# SPDX-License-Identifier: Apache-2.0
"""One bad value or file hides no other; what belongs elsewhere is refused by name."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvtax.look.instance_summary import cost
from kvtax.look.live import Watched
from kvtax.look.prometheus import serve
from kvtax.look.requests import TIMED_PARTS, WAITS
from kvtax.paths import REPOSITORY
from kvtax.records.files import is_torn
from kvtax.steps import life
from tests.look.conftest import main, only
from tests.look.made_up_server import Server, served

STEPS = 400  # of the fixture `records`
ENGINE, WORKER, REQUEST = (
    "engine_step.jsonl",
    "worker_step.r0.jsonl",
    "engine_request.jsonl",
)


def shown(folder: Path, capsys) -> tuple[int, str]:
    status = main([str(folder)])
    return status, capsys.readouterr().out


def replace_line(path: Path, number: int, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line + b"\n"
    path.write_bytes(b"".join(lines))


def changed(path: Path, number: int, **values) -> bytes:
    line = json.loads(path.read_bytes().splitlines()[number - 1])
    return json.dumps(line | values).encode()


def slow(*values: object) -> list:
    """Cases that make test-fast leaves out, with one of their kind in it."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def some(cases: Iterable, fast: int) -> list:
    """All cases, of which test-fast has the first few."""
    return [*list(cases)[:fast], *slow(*list(cases)[fast:])]


BAD_LINES = {
    "t_ns of 64 bits": {"t_ns": 2**64},
    "cache_size a string": {"cache_size": "many"},
    "NaN": {"step_us": float("nan")},
    "UTF-8": b'{"step_id": 5, "t_ns": 1, "id": "\xff\xfe"}',
    "no JSON": b"{",
    "t_ns of 63 bits": {"t_ns": 2**63},
    "cache_size of 31 bits": {"cache_size": 2**31},
    "infinite": {"step_us": float("inf")},
    "no step_id": {"step_id": None},
    "no t_ns": {"t_ns": None},
    "t_ns below zero": {"t_ns": -(2**63)},
    "t_ns beyond what sums can hold": {"t_ns": 2**63 - 1},
    "step_id below zero": {"step_id": -5},
    "1e400": b'{"step_id": 5, "t_ns": 1, "step_us": 1e400}',
    "NULs": b"\0" * 4096,
    "a list": b"[1, 2]",
    "null": b"null",
}


# Each kind in the middle of both files; some kinds also in the first and last record.
BAD_STEPS = [
    *((ENGINE, bad, 8) for bad in BAD_LINES),
    *((WORKER, bad, 8) for bad in BAD_LINES),
    *((ENGINE, bad, number) for bad in list(BAD_LINES)[:7] for number in (2, 401)),
]


@pytest.mark.parametrize("where", some(BAD_STEPS, 5), ids=str)
def test_a_bad_step_is_left_out_and_named(records, capsys, where):
    file, bad, number = where
    path, value = records / file, BAD_LINES[bad]
    if file == WORKER and isinstance(value, dict):
        # A worker's record has no counts, only times.
        value = {
            name if name in ("t_ns", "step_id") else "execute_model_us": inner
            for name, inner in value.items()
        }
        if bad == "cache_size of 31 bits":
            value = {"execute_model_us": [1]}
    line = value if isinstance(value, bytes) else changed(path, number, **value)
    replace_line(path, number, line)
    status, printed = shown(records, capsys)
    assert_named(status, printed, path, number, is_last=number == 401, line=line)
    assert "400 steps" in printed if file == WORKER else "399 steps" in printed
    # Without those that were in the step.
    assert any(f", {count} requests" in printed for count in (50, 49, 48))


def assert_named(
    status: int, printed: str, path: Path, number: int, is_last: bool, line: bytes
) -> None:
    """A bad line is a fault that is named; a torn last one is what a kill leaves."""
    if is_last and is_torn(line + b"\n"):
        assert status == 0
        assert "1 torn last line" in printed
    else:
        assert status == 2
        assert f"{path}:{number}: " in printed


BAD_REQUESTS = {
    "prompt_tokens of 64 bits": {"prompt_tokens": 2**64},
    "arrival_ns of 63 bits": {"arrival_ns": 2**63},
    "kv_wait_ns of 63 bits": {"kv_wait_ns": [2**63, 2**63 + 5]},
    "NaN": {"before_engine_us": float("nan")},
    "UTF-8": b'{"id": "\xff\xfe", "arrival_ns": 1, "prompt_tokens": 1}',
    "NULs": b"\0" * 4096,
    "no JSON": b"{",
}


BAD_REQUEST_LINES = [
    *((bad, 8) for bad in BAD_REQUESTS),
    *((bad, number) for bad in ("NaN", "NULs", "no JSON") for number in (2, 51)),
]


@pytest.mark.parametrize("where", some(BAD_REQUEST_LINES, 3), ids=str)
def test_a_bad_request_is_left_out_and_named(records, capsys, where):
    bad, number = where
    path, value = records / REQUEST, BAD_REQUESTS[bad]
    line = value if isinstance(value, bytes) else changed(path, number, **value)
    replace_line(path, number, line)
    status, printed = shown(records, capsys)
    assert_named(status, printed, path, number, is_last=number == 51, line=line)
    assert "400 steps in" in printed and ", 49 requests" in printed


IMPOSSIBLE = {
    "ended before it arrived": {"arrival_ns": 2**62},
    "ended before its arrival by all bits": {"finished_ns": -(2**63)},
    "last step before the first": {
        "first_step": 90,
        "first_token_step": 80,
        "last_step": 70,
    },
    "preempted out of order": {"preempted_steps": [45, 31, 20, 49]},
    "negative tokens": {"output_tokens": -5},
    "negative wait": {"kv_wait_ns": [9, 5]},
}


@pytest.mark.parametrize("bad", IMPOSSIBLE)
def test_an_impossible_request_is_in_no_quantile(records, bad):
    path = records / REQUEST
    replace_line(path, 8, changed(path, 8, **IMPOSSIBLE[bad]))
    instance = only(records)
    (warning,) = instance.warnings
    assert (warning.kind, warning.message[:2]) == ("impossible_requests", "1 ")
    assert instance.requests.height == 49
    times = ["ttft_us", "e2e_us", *(f"e2e.{part}" for part in (*WAITS, *TIMED_PARTS))]
    assert instance.requests.select(times).min().row(0) >= (0,) * len(times)


@pytest.mark.parametrize("number", [-1, 2**63 - 1])
def test_a_request_of_a_step_that_is_not_there_is_counted(records, number):
    path = records / REQUEST
    steps = dict.fromkeys(("first_step", "first_token_step", "last_step"), number)
    replace_line(path, 8, changed(path, 8, preempted_steps=[], **steps))
    instance = only(records)
    (warning,) = instance.warnings
    assert warning.kind == "unplaced_requests"
    assert instance.requests.height == 49


IMPOSSIBLE_STEPS = [
    ("steps", "cache_size", -1),
    ("steps", "schedule_us", 1e300),
    ("steps", "connector_calls", {"build_connector_meta": -7}),
    ("workers", "execute_model_us", -9.0),
    ("steps", "running", -3),
    ("steps", "schedule_us", -50.0),
    ("steps", "step_us", 1e300),
    ("steps", "update_us", 1e30),
    ("steps", "connector_self_us", {"build_connector_meta": 1e300}),
    ("steps", "connector_self_us", {"build_connector_meta": -500.0}),
]


@pytest.mark.parametrize("impossible", some(IMPOSSIBLE_STEPS, 4))
def test_an_impossible_step_is_in_no_quantile(tmp_path, impossible):
    side, field, value = impossible
    server = served(tmp_path / "records")
    server.requests.clear()
    getattr(server, side)[5][field] = value
    instance = only(server.write())
    assert instance.steps.height == STEPS - 1
    ((kind, message),) = [
        (warning.kind, warning.message) for warning in instance.warnings
    ]
    assert (kind, message[:8]) == ("impossible_steps", "1 steps ")
    assert cost(instance).connector.most_us < 10_000


def test_a_method_that_the_header_lacks_keeps_its_time(tmp_path):
    server = served(tmp_path / "records")
    for record in (*server.steps, *server.workers):
        record["connector_self_us"]["late_hook"] = 5_000.0
        record["connector_calls"]["late_hook"] = 2
        record["step_us"] = record.get("step_us", 0) + 10_000
    summary = cost(only(server.write()))
    late = {part.name: part for part in summary.methods if "late_hook" in part.name}
    assert set(late) == {"scheduler.late_hook", "worker.late_hook"}
    for part in late.values():
        assert part.mean_us == pytest.approx(5_000)
        assert part.calls_per_step == 2
    assert summary.connector.mean_us > 10_000


def rotated(path: Path, at: int = 200) -> Path:
    """Move the first `at` records to the older part; return its path."""
    head, *lines = path.read_bytes().splitlines(keepends=True)
    older = path.with_name(f"{path.name}.1")
    older.write_bytes(b"".join([head, *lines[:at]]))
    path.write_bytes(b"".join([head, *lines[at:]]))
    return older


def packed(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


# What may be done to each file, and changes no figure.
WRITTEN_OTHERWISE = {
    "rotated": lambda path: rotated(path, 20),
    "rotated, the older compressed": lambda path: packed(rotated(path, 20)),
    "rotated, both compressed": lambda path: [packed(rotated(path, 20)), packed(path)],
    "compressed": packed,
    "compressed, under the old name": lambda path: rewrite(path, gzip.compress),
    "killed between two moves": lambda path: [
        path.rename(f"{path}.1"),
        path.with_name(f"{path.name}.new").write_text('{"schema":"kvtax.'),
    ],
    "lines of Windows": lambda path: rewrite(path, crlf),
    "a byte order mark": lambda path: rewrite(
        path, lambda data: b"\xef\xbb\xbf" + data
    ),
}


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("how", WRITTEN_OTHERWISE)
@pytest.mark.parametrize("files", [[ENGINE, WORKER, REQUEST], *slow([ENGINE])])
def test_what_is_written_otherwise_is_read_as_it_is(records, whole, how, files):
    for name in files:
        WRITTEN_OTHERWISE[how](records / name)
    instance = only(records)
    assert instance.steps.equals(whole.steps)
    assert instance.requests.equals(whole.requests)
    assert instance.warnings == []


def test_without_a_folder_to_unpack_records_into_tmpdir_is_named(
    records, capsys, monkeypatch
):
    path = records / "engine_step.jsonl"
    path.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    assert main([str(records)]) == 2
    assert "set TMPDIR to one that may be written" in capsys.readouterr().out


@pytest.mark.parametrize("header", ['{"schema":"kvtax.engine_st', ""])
def test_a_disk_that_filled_at_a_rotation_leaves_the_older_part(
    records, capsys, header
):
    for name in (ENGINE, WORKER, REQUEST):
        (records / name).rename(records / f"{name}.1")
        (records / name).write_text(header)
    status, printed = shown(records, capsys)
    assert "400 steps in" in printed and ", 50 requests" in printed
    assert status == 2
    for name in (ENGINE, WORKER, REQUEST):
        assert f"{records / name}:1: no header line" in printed
    assert only(records).steps["model_us"].sum() > 0


NO_HEADER = ":1: no header line"
BROKEN = {
    "torn header": (b'{"schema":"kvtax.', NO_HEADER),
    "folder": (os.mkdir, ": Is a directory"),
    "pipe": (os.mkfifo, ": not a plain file"),
    "empty": (b"", NO_HEADER),
    "brace": (b"{\n", NO_HEADER),
    "NULs": (b"\0" * 4096, NO_HEADER),
}
FILES = [ENGINE, WORKER, REQUEST]


@pytest.mark.parametrize("how", some(BROKEN, 2))
@pytest.mark.parametrize("file", FILES)
def test_a_broken_file_is_named_and_hides_no_other(records, capsys, file, how):
    served(records / "second").write()
    path, (make, why) = records / file, BROKEN[how]
    path.unlink(missing_ok=True)
    if isinstance(make, bytes):
        path.write_bytes(make)
    else:
        make(path)
    status, printed = shown(records, capsys)
    assert status == 2
    assert f"{path}{why}" in printed
    assert printed.count("400 steps in") == 2 - (file == ENGINE)


@pytest.mark.parametrize("field", ["began_ns", "began_unix_ns"])
def test_a_header_whose_moment_cannot_be_is_named(tmp_path, capsys, field):
    server = served(tmp_path / "records")
    server.header |= {"began_ns": 1, "began_unix_ns": 2} | {field: 10**30}
    status, printed = shown(server.write(), capsys)
    assert status == 2
    assert f"{server.folder / ENGINE}:1: bad record" in printed


def test_a_life_that_is_removed_meanwhile_hides_no_other(records, monkeypatch, capsys):
    served(records / "second").write()
    reader = life.StepReader

    def removed(path, *args, **options):
        opened = reader(path, *args, **options)
        if path.parent == records:
            for file in records.glob("*.jsonl"):
                file.unlink()
        return opened

    monkeypatch.setattr(life, "StepReader", removed)
    main([str(records)])
    assert "second: vLLM 0.18.1, 400 steps in" in capsys.readouterr().out


def test_a_damaged_compressed_file_is_named(records, capsys):
    other = served(records / "second").write()
    path = records / WORKER
    data = bytearray(gzip.compress(path.read_bytes()))
    data[len(data) // 2 :] = random.Random(1).randbytes(len(data) // 2)
    path.write_bytes(data)
    status, printed = shown(records, capsys)
    assert status == 2
    assert str(path) in printed
    assert other.name in printed and printed.count("400 steps in") == 2


OF_OTHERS = [
    *(
        (file, fact, field)
        for file in (WORKER, REQUEST, f"{ENGINE}.1", f"{REQUEST}.1")
        for fact, field in (
            ("kernel", {"boot_id": "another"}),
            ("vLLM", {"vllm_version": "0.32.0"}),
        )
    ),
    # A worker has its own process.
    *((file, "process id 99, not 1", {"pid": 99}) for file in (REQUEST, f"{ENGINE}.1")),
]


@pytest.mark.parametrize("other", some(OF_OTHERS, 4))
def test_a_file_of_another_life_is_refused_by_name(tmp_path, capsys, other):
    file, fact, field = other
    server = served(tmp_path / "records")
    server.header |= {"boot_id": "one", "pid": 1}
    path = server.write() / file
    rotated(server.folder / ENGINE)
    rotated(server.folder / REQUEST, 20)
    replace_line(path, 1, changed(path, 1, **field))
    status, printed = shown(server.folder, capsys)
    assert status == 2
    assert f"{path}: of another life of the engine: {fact}" in printed
    steps = 200 if file == f"{ENGINE}.1" else 400
    assert f"{steps} steps in" in printed
    if file == f"{REQUEST}.1":
        assert ", 30 requests" in printed


def test_a_rank_of_a_second_life_in_the_folder_is_not_joined(
    records, whole, tmp_path, capsys
):
    """Rank 1 is of a restart with two ranks; its first files could not be begun."""
    later = Server(tmp_path / "later")
    later.now_us = 60e6
    for _ in range(STEPS):
        later.step(model_us=9_000)
    rank = (later.write() / WORKER).read_text()
    (records / "worker_step.r1.jsonl").write_text(rank)
    instance = only(records)
    assert instance.steps.equals(whole.steps)
    assert cost(instance).step.mean_us == cost(whole).step.mean_us
    status, printed = shown(records, capsys)
    assert status == 2
    assert "worker_step.r1.jsonl: of another life of the engine: 100% of its" in printed


def test_ranks_of_one_life_are_joined_while_steps_overlap(tmp_path):
    server = Server(tmp_path / "records")
    for _ in range(STEPS):
        server.step(model_us=9_000)
    for step, worker in zip(server.steps, server.workers, strict=True):
        step["t_ns"] -= 4_500_000 * step["step_id"]
        worker["t_ns"] -= 4_500_000 * step["step_id"] - 3_000_000
    instance = only(server.write())
    assert instance.warnings == []
    assert instance.steps["execute_model_us"].null_count() == 0


@pytest.mark.parametrize("file", [ENGINE, *slow(WORKER)])
def test_a_copy_of_the_file_as_its_older_part_counts_no_step_twice(
    records, whole, capsys, file
):
    (records / f"{file}.1").write_bytes((records / file).read_bytes())
    instance = only(records)
    assert instance.steps.equals(whole.steps)
    assert instance.requests.equals(whole.requests)
    status, printed = shown(records, capsys)
    assert status == 2
    assert f"{records / file}: 400 steps are in the file twice" in printed


def forbid(monkeypatch, folder: Path) -> None:
    """Let a folder not be read, also by root, who may read all."""
    scandir = os.scandir

    def guarded(path):
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)


def test_a_folder_that_may_not_be_read_is_named_and_hides_no_other(
    records, monkeypatch, capsys
):
    closed = served(records / "closed").write()
    forbid(monkeypatch, closed)
    status, printed = shown(records, capsys)
    assert status == 2
    assert f"closed: [Errno 13] Permission denied: '{closed}'" in printed
    assert "400 steps in" in printed
    forbid(monkeypatch, records)
    assert main([str(records)]) == 2
    assert f"kvtax: {records}: Permission denied" in capsys.readouterr().err


@pytest.mark.slow
def test_a_name_that_is_no_text_is_shown_in_all_that_is_written(
    records, tmp_path, capfd
):
    folder = Path(os.fsdecode(os.fsencode(records) + b"-\xff"))
    life = served(folder / os.fsdecode(b"life-\xfe\x1b[2J"))
    replace_line(life.write() / ENGINE, 8, b"{")
    page, trace = tmp_path / "page.html", tmp_path / "trace"
    assert main([str(folder), "--out", str(page), "--perfetto", str(trace)]) == 2
    printed = capfd.readouterr().out
    assert "life-\\udcfe\\x1b[2J: vLLM" in printed
    assert "\\udcfe" in page.read_text()
    server = serve(Watched(folder), "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            assert b"life-" in answer.read()
    finally:
        server.shutdown()


def test_an_error_is_shown_and_not_obeyed(records, capsys):
    name = "\x1b]0;owned\x07"
    assert main([str(records / name)]) == 2
    printed = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07" in printed
    assert not [c for c in set(printed) - {"\n"} if not c.isprintable()]


@pytest.mark.slow
def test_a_terminal_without_our_letters_gets_the_table(records):
    command = [sys.executable, "-m", "kvtax", "look", str(records)]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=env, capture_output=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert b"400 steps in" in done.stdout


@pytest.mark.parametrize("option", ["--out", "--perfetto"])
@pytest.mark.parametrize("name", ["", ".", "/", "folder"])
def test_a_folder_in_the_place_of_a_file_is_refused_and_nothing_left(
    records, tmp_path, monkeypatch, capsys, option, name
):
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert main([str(records), option, name]) == 2
    assert capsys.readouterr().err.startswith("kvtax: ")
    assert [path.name for path in here.iterdir()] == ["folder"]
    assert not Path("/.partial").exists()


def test_a_folder_of_links_is_followed_and_a_circle_ends(tmp_path, capsys):
    served(tmp_path / "real").write()
    links = tmp_path / "links"
    links.mkdir()
    (links / "server").symlink_to(tmp_path / "real")
    (links / "circle").symlink_to(links)
    assert main([str(links)]) == 0
    assert "server: vLLM 0.18.1, 400 steps" in capsys.readouterr().out


def test_a_method_that_could_not_be_timed_is_named_once(tmp_path):
    server = served(tmp_path / "records")
    why = "a compiled method that cannot be wrapped"
    server.header["not_timed"] = {"get_finished": why}
    folder = server.write()
    text = (folder / WORKER).read_text()
    (folder / "worker_step.r1.jsonl").write_text(text)
    warnings = [(warning.place, warning.message) for warning in only(folder).warnings]
    message = f"not timed: {why}"
    assert warnings == [
        ("scheduler.get_finished", message),
        ("worker.get_finished", message),
    ]
