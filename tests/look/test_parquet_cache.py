# SPDX-License-Identifier: Apache-2.0
"""A second look is quick and says the same, and never what is no longer true."""

from __future__ import annotations

import os
import time

import pytest
from polars.testing import assert_frame_equal

from kvtax.look.instances import read_instances
from kvtax.steps import parquet_cache
from tests.look.made_up_server import served

KEPT = "engine_step.parquet"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(parquet_cache, "FEWEST_STEPS", 10)


@pytest.fixture
def folder(tmp_path):
    """Records of a server that ended an hour ago, with a torn last line."""
    folder = served(tmp_path / "records", steps=60).write()
    with (folder / "engine_step.jsonl").open("a") as file:
        file.write('{"step')
    for path in folder.iterdir():
        age(path, 3_600)
    return folder


def age(path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def read(folder):
    ((instance,), _) = read_instances(folder)
    return instance


def test_a_second_look_says_what_the_first_did(folder):
    first = read(folder)
    assert (folder / KEPT).is_file()
    second = read(folder)
    assert_frame_equal(second.steps, first.steps)
    assert second.warnings == first.warnings != []
    assert_frame_equal(second.requests, first.requests)


def test_it_does_not_read_the_records_again(folder, monkeypatch):
    read(folder)
    monkeypatch.setattr("kvtax.steps.life._read", None)
    read(folder)


def test_records_that_changed_are_read_again(folder):
    read(folder)
    path = folder / "worker_step.r0.jsonl"
    path.write_text(path.read_text().replace('"execute_model_us": ', '"gone": '))
    age(path, 1_800)
    assert read(folder).steps["model_us"].sum() == 0


def test_nothing_is_kept_of_a_server_that_still_writes(folder):
    age(folder / "engine_step.jsonl", 1)
    read(folder)
    assert not (folder / KEPT).exists()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\x00" * 4_000])
def test_a_kept_file_that_is_torn_is_made_again(folder, content):
    steps = read(folder).steps
    (folder / KEPT).write_bytes(content)
    assert_frame_equal(read(folder).steps, steps)
    assert (folder / KEPT).stat().st_size > 4_000


def test_a_folder_that_cannot_be_written_is_looked_at_all_the_same(folder, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("polars.DataFrame.write_parquet", refuse)
    assert read(folder).steps.height == 60
    assert not list(folder.glob("*parquet*"))


def test_two_engines_in_one_folder_keep_their_own(folder):
    path = folder / "engine_step.jsonl"
    other = folder / "engine_step.other.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[:21]))
    age(other, 3_600)
    for _ in range(2):
        instances, _ = read_instances(folder)
        assert [one.steps.height for one in instances] == [60, 20]
