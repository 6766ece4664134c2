# SPDX-License-Identifier: Apache-2.0
"""Files of records are whole, private and bounded, whatever their disk does."""

from __future__ import annotations

import _thread
import errno
import json
import logging
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kvtax_probe import files, folder, requests, settings
from kvtax_probe.engine import EngineStep as Record
from kvtax_probe.files import RecordFile
from kvtax_probe.threads import ThreadsFile

from kvtax.records.files import read_lines
from kvtax.records.requests import hashed_id, key_of_ids
from kvtax.records.steps import (
    EngineHeader,
    EngineStep,
    ThreadsHeader,
    ThreadTimes,
    only_life,
)
from kvtax.steps.step_file import read_steps

MOST_MB = 0.02
LIFE = "a life"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Where records go, that only the test writes."""
    monkeypatch.setenv("KVTAX_STEP_RECORDS_DIR", str(tmp_path))
    monkeypatch.setattr(RecordFile, "_run", lambda self: None)
    monkeypatch.setattr(files, "GIVE_AWAY_S", 0)
    for name, version in (("vllm", None), ("vllm.version", "0.0")):
        module = ModuleType(name)
        module.__version__ = version
        monkeypatch.setitem(sys.modules, name, module)
    return tmp_path


def written(steps: int, each: int = 20) -> RecordFile:
    schema = "kvtax.engine_step/1"
    file = RecordFile(LIFE, "engine_step", schema, lambda: {"methods": []})
    for first in range(0, steps, each):
        write(file, *range(first, min(first + each, steps)))
    return file


def write(file: RecordFile, *steps: int) -> None:
    for step_id in steps:
        file.append(Record(step_id, 10**15 + step_id, schedule_us=1.5))
    file.flush()


def step_ids(folder) -> list[int]:
    path = folder / LIFE / "engine_step.jsonl"
    return read_steps(path, EngineHeader, ["step_id"]).frame["step_id"].to_list()


def test_files_stay_below_the_limit_and_hold_the_newest_steps(place, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", MOST_MB * 1e6)
    file = written(2_000)
    parts = list((place / LIFE).iterdir())
    assert {part.name for part in parts} == {"engine_step.jsonl", "engine_step.jsonl.1"}
    # A flush may go over a half by what it writes.
    assert sum(part.stat().st_size for part in parts) < MOST_MB * 1e6 * 1.2
    ids = step_ids(place)
    assert ids == list(range(ids[0], 2_000))
    assert 100 < len(ids) < 2_000
    assert not file._failed_s
    first, second = (json.loads(part.read_text().partition("\n")[0]) for part in parts)
    for name in ("schema", "life", "pid", "methods"):
        assert first[name] == second[name]


def test_a_file_that_is_too_old_is_begun_anew(place, monkeypatch):
    monkeypatch.setattr(files, "MAX_S", 7_200)
    file = written(100)
    file._began_s -= 3_700
    write(file, 100)
    assert (place / LIFE / "engine_step.jsonl.1").is_file()
    assert step_ids(place) == list(range(101))


def test_a_folder_that_is_removed_is_made_anew(place):
    file = written(100)
    shutil.rmtree(place / LIFE)
    write(file, 100)
    assert step_ids(place) == [100]


def said_of(file: RecordFile, logged: list[str]) -> list[str]:
    """Messages of this file: threads of engines before may write theirs."""
    return [message for message in logged if str(file.path) in message]


def test_a_forked_child_writes_no_record_of_its_parent(place):
    file = written(5)
    file.append(Record(5, 10**15, schedule_us=1.5))
    if not (pid := os.fork()):
        file.append(Record(6, 10**15, schedule_us=1.5))
        file.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert step_ids(place) == [*range(5)]
    file.flush()
    assert step_ids(place) == [*range(6)]


def test_a_disk_that_is_full_at_a_new_file_leaves_the_records(
    place, monkeypatch, logged
):
    file = written(100)
    monkeypatch.setattr(files, "MAX_BYTES", 1)
    os_write = os.write

    def full(descriptor, data):
        if data.startswith(b'{"schema"'):
            os_write(descriptor, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os_write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", full)
        for step_id in (100, 101):
            write(file, step_id)
        names = [part.name for part in (place / LIFE).iterdir()]
        assert names == ["engine_step.jsonl"]
        assert step_ids(place) == list(range(100))
    file.flush()
    assert step_ids(place) == list(range(102))
    assert "records lost: 0" in said_of(file, logged)[1]


@pytest.mark.parametrize("waiting", [10_000, 30])
def test_a_disk_that_is_full_for_a_while_leaves_whole_records_and_two_messages(
    place, monkeypatch, logged, waiting
):
    monkeypatch.setattr(files, "MOST_WAITING", waiting)
    file = written(100)
    os_write = os.write
    room = [50]

    def full(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = os_write(descriptor, data[: room[0]])
        room[0] -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", full)
        for step_id in range(100, 200):
            write(file, step_id)
            # No torn line, so whoever reads meanwhile finds whole records.
            assert step_ids(place) == list(range(100))
    write(file, 200)
    # The first batch was encoded; after it the newest stay.
    lost = max(0, 99 - waiting)
    kept = [*range(101), *range(101 + lost, 201)]
    assert step_ids(place) == kept
    cannot, could_not = said_of(file, logged)
    assert "cannot be written" in cannot
    assert re.search(r"from \S+ to \S+; records lost: (\d+)", could_not)[1] == str(lost)


@pytest.fixture
def logged():
    """Messages of the recorder, whether vLLM lets others hear them or not."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    settings.logger.addHandler(handler)
    yield messages
    settings.logger.removeHandler(handler)


def numbers_of(step_id: int) -> Record:
    count = np.int64(step_id)
    return Record(step_id, 10**15, 1.5, running=count, cache_size=count)


def test_counts_of_a_scheduler_that_uses_numpy_are_written(place):
    file = written(1)
    file.append(numbers_of(5))
    file.flush()
    path = place / LIFE / "engine_step.jsonl"
    last = read_lines(path, EngineHeader, EngineStep).records[-1]
    assert (last.running, last.cache_size) == (5, 5)


def test_a_file_whose_header_cannot_be_written_serves_on(place):
    file = RecordFile(
        LIFE, "engine_step", "kvtax.engine_step/1", lambda: {"a": "\udcff"}
    )
    file.append(Record(1, 1, 1.5))
    file.flush()
    assert not [*place.rglob("*.jsonl*")]


def test_records_that_a_hanging_disk_keeps_waiting_are_bounded_and_counted(
    place, monkeypatch, logged
):
    monkeypatch.setattr(files, "MOST_PENDING", 50)
    file = written(0)
    with file._lock:
        for step_id in range(120):
            file.append(Record(step_id, 10**15, 1.5))
        file.shed()
    file.flush()
    assert step_ids(place) == list(range(70, 120))
    (message,) = said_of(file, logged)
    assert message.endswith("records lost: 70")


def test_a_thread_whose_name_is_cut_off_in_a_character_is_recorded(place):
    begun, ended = threading.Event(), threading.Event()

    def work():
        Path("/proc/thread-self/comm").write_bytes("äöüßäöüß".encode()[:15])
        begun.set()
        ended.wait()

    # Not a thread of `threading`, which would know its name.
    _thread.start_new_thread(work, ())
    begun.wait()
    file = ThreadsFile(LIFE, lambda: 7, set())
    file.flush()
    ended.set()
    assert not file._failed_s
    path = place / LIFE / "threads.jsonl"
    (record,) = read_lines(path, ThreadsHeader, ThreadTimes).records
    assert any(name.startswith("äöüßäöü") for name in record.threads)


def test_threads_of_an_idle_engine_are_recorded_every_ten_seconds(place):
    file = ThreadsFile(LIFE, lambda: 7, set())
    for idle_s in (0, 5, 4, 2, 5):
        file._recorded_s -= idle_s
        file.flush()
    path = place / LIFE / "threads.jsonl"
    records = read_lines(path, ThreadsHeader, ThreadTimes).records
    assert [record.step_id for record in records] == [7, 7]


def test_a_writer_killed_between_two_names_leaves_records_that_are_read(
    place, monkeypatch
):
    file = written(100)
    monkeypatch.setattr(files, "MAX_BYTES", 1)
    rename = os.rename

    def killed(source, target, **folders):
        if str(source).endswith(".new"):
            raise KeyboardInterrupt
        rename(source, target, **folders)

    monkeypatch.setattr(files.os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(file, 100)
    assert only_life(place) == place / LIFE
    assert step_ids(place) == list(range(100))


def test_a_slow_disk_keeps_the_limit(place, monkeypatch):
    """Records come as fast as they are written: 32 of them while each write lasts."""
    monkeypatch.setattr(files, "MAX_BYTES", MOST_MB * 1e6)
    file = written(0)
    next_id, os_write = iter(range(1, 10**6)), os.write

    def slow(descriptor, data):
        for _ in range(32):
            file.append(Record(next(next_id), 10**15, 1.5))
        return os_write(descriptor, data)

    file.append(Record(0, 10**15, 1.5))
    monkeypatch.setattr(files.os, "write", slow)
    for _ in range(200):
        file.flush()
    parts = [*(place / LIFE).iterdir()]
    assert len(parts) == 2
    assert sum(part.stat().st_size for part in parts) < MOST_MB * 1e6 * 1.5
    kept = step_ids(place)
    assert kept == list(range(kept[0], kept[-1] + 1))


def test_a_header_says_how_many_records_the_limit_has_dropped(place, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", MOST_MB * 1e6)
    written(2_000)
    kept = step_ids(place)
    path = place / LIFE / "engine_step.jsonl"
    newest = read_lines(path, EngineHeader, EngineStep)
    assert newest.header.lost == kept[0]


GONE: dict[str, Callable[[Path], object]] = {
    "removed": lambda life: shutil.rmtree(life),
    "moved": lambda life: life.rename(life.with_name("elsewhere")),
    "unlinked": lambda life: (life / "engine_step.jsonl").unlink(),
    "truncated": lambda life: os.truncate(life / "engine_step.jsonl", 0),
}


@pytest.mark.parametrize("how", GONE)
def test_a_file_that_is_gone_is_begun_anew_and_a_message_says_so(place, logged, how):
    file = written(100)
    GONE[how](place / LIFE)
    write(file, 100)
    assert step_ids(place) == [100]
    (message,) = said_of(file, logged)
    assert message.endswith("it is begun anew")
    assert b"\0" not in file.path.read_bytes()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_records_are_of_their_user_alone_under_any_umask(place, umask):
    before = os.umask(umask)
    try:
        written(10)
        recorder = requests.RequestRecorder(LIFE, object())
        recorder._header()
    finally:
        os.umask(before)
    life = place / LIFE
    assert stat.S_IMODE(life.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in life.iterdir()}
    assert modes == {0o600}


PLACES = ("engine_step.jsonl", "engine_step.jsonl.1", "engine_step.jsonl.new")


@hypothesis_settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(links=st.sets(st.sampled_from(PLACES)), at=st.integers(0, 3))
def test_no_write_follows_a_link(place, monkeypatch, links, at):
    """Links to a file outside, put into the folder between any two rotations."""
    monkeypatch.setattr(files, "MAX_BYTES", 1)
    shutil.rmtree(place / LIFE, ignore_errors=True)
    victim = place / "victim"
    victim.write_text("precious")
    file = written(0)
    for flush in range(4):
        if flush == at:
            for name in links:
                (place / LIFE / name).unlink(missing_ok=True)
                (place / LIFE / name).symlink_to(victim)
        write(file, flush)
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_nothing_is_written_into_a_folder_of_another_user(place, logged):
    file = written(10)
    life, victim = place / LIFE, place / "victim"
    victim.write_text("precious")
    life.rename(place / "theirs")
    life.mkdir()
    (life / "engine_step.jsonl.new").symlink_to(victim)
    os.chown(life, 65534, 65534)
    write(file, 10)
    assert victim.read_text() == "precious"
    assert not (life / "engine_step.jsonl").exists()
    assert "cannot be written" in said_of(file, logged)[-1]


def test_an_id_is_hashed_with_a_key_of_its_life_that_is_beside_the_records(place):
    names = []
    for life in ("one life", "another"):
        recorder = requests.RequestRecorder(life, object())
        assert recorder._header() == {"ids": "keyed"}
        names.append(recorder._name("chatcmpl-someone@example.org-0123abcd"))
        key = key_of_ids(place / life)
        assert names[-1] == hashed_id("chatcmpl-someone@example.org", key)
    assert len({*names, hashed_id("chatcmpl-someone@example.org")}) == 3


LIVES = [f"20261101T00000{n}.000000Z-host-dp0-{n}" for n in range(4)]


@pytest.fixture
def lives(place) -> Path:
    """Four lives of 1,000 bytes each; the last two still write."""
    for number, name in enumerate(LIVES):
        path = place / name / "engine_step.jsonl"
        path.parent.mkdir()
        path.write_bytes(b"header\n" + b"record..\n" * 110 + b"ab\n")
        at_s = time.time() - (1_000 if number < 2 else 0)
        for each in (path, path.parent):
            os.utime(each, (at_s, at_s))
    return place


@pytest.mark.parametrize(
    ("limit", "left"), [(5_000, 4), (3_500, 3), (2_500, 2), (1, 2)]
)
def test_the_oldest_lives_that_have_ended_go_first(lives, logged, limit, left):
    (lives / LIVES[0] / "notes.txt").write_text("mine")
    records = folder.RecordsFolder(lives)
    share = records.share(limit)
    there = [n for n in LIVES if (lives / n / "engine_step.jsonl").exists()]
    assert there == LIVES[4 - left :]
    assert share == limit / 2
    # What the recorder did not write stays.
    assert (lives / LIVES[0] / "notes.txt").read_text() == "mine"
    assert [line.rpartition(" ")[2] for line in logged] == ["111"] * (4 - left)


def test_another_folder_is_no_life_and_stays(lives, tmp_path):
    mine = lives / "20261101-my-notes"
    mine.mkdir()
    (mine / "engine_step.jsonl").write_text("x" * 5_000)
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    outside.mkdir()
    (outside / "engine_step.jsonl").write_text("x" * 5_000)
    (lives / "20261101T000000.000000Z-host-dp0-0").rename(lives / "kept")
    (lives / "20261101T000000.000000Z-host-dp0-0").symlink_to(outside)
    folder.RecordsFolder(lives).share(1)
    assert (mine / "engine_step.jsonl").stat().st_size == 5_000
    assert (outside / "engine_step.jsonl").stat().st_size == 5_000


@pytest.mark.parametrize("has_older_half", [False, True])
def test_a_disk_that_the_own_records_fill_gets_the_newest(
    place, monkeypatch, has_older_half
):
    """A disk of 20 kB, of which all is the recorder's."""
    monkeypatch.setattr(files, "MAX_BYTES", 30_000 if has_older_half else 1e9)
    os_write = os.write

    def limited(descriptor, data):
        used = sum(f.stat().st_size for f in (place / LIFE).glob("*"))
        if used + len(data) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os_write(descriptor, data)

    monkeypatch.setattr(files.os, "write", limited)
    monkeypatch.setattr(folder.RecordsFolder, "fills_disk", lambda self: True)
    file = written(3_000)
    file.flush()
    kept = step_ids(place)
    assert kept == list(range(kept[0], 3_000))
    assert kept[0] > 0
    lost = read_lines(file.path, EngineHeader, EngineStep).header.lost
    assert lost <= kept[0]
    assert file._lost + file._older_records + file._records == 3_000


BAD_LABELS = ["x", "[1]", "NaN", '{"a": "\\ud800"}', '{"a":' + "[" * 100_000]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_a_label_that_cannot_be_written_is_named_and_left_out(
    monkeypatch, logged, number
):
    monkeypatch.setenv("KVTAX_STEP_RECORDS_LABEL", BAD_LABELS[number])
    assert settings.label() == {}
    (message,) = logged
    assert "KVTAX_STEP_RECORDS_LABEL is no JSON object" in message


def test_an_unknown_kind_of_ids_is_named_and_ids_are_hashed(monkeypatch, logged):
    for text, plain in (("", False), ("plain", True), ("hashed", False)):
        monkeypatch.setenv("KVTAX_REQUEST_IDS", text)
        assert settings.has_plain_ids() == plain
    assert not logged
    monkeypatch.setenv("KVTAX_REQUEST_IDS", "PLAIN")
    assert not settings.has_plain_ids()
    (message,) = logged
    assert "KVTAX_REQUEST_IDS=PLAIN is unknown" in message
