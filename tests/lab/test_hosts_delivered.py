# SPDX-License-Identifier: Apache-2.0
"""What a store has of the same work is taken from there, and nothing else is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lab.hosts import delivered as module
from lab.hosts.delivered import Work, delivered
from lab.store.store import Store, store_of_run

WORK = Work("tests.hosts.squares", {"job": b"1"}, {"r0": b"2 0", "arm/r1": b"3 0"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Both pieces of WORK, each with a file that says its name."""
    store = store_of_run(str(tmp_path), "run", resume=False)
    for number, name in enumerate(WORK.tasks):
        made = tmp_path / "made" / str(number)
        made.mkdir(parents=True)
        (made / "name").write_text(name)
        store.put(name, made, WORK.sha256(name), f"10.0.0.{number}")
    return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tasks that the cluster would be asked for."""
    asked = []

    def spread(address, module, files, tasks, alone, place, progress):
        asked.extend(tasks)
        return iter(())

    monkeypatch.setattr(module, "spread", spread)
    return asked


def taken(work: Work, store: Store, aside: Path, good=lambda *of: True) -> list[tuple]:
    return [
        (one.name, one.host, (one.folder / "name").read_text())
        for one in delivered("nowhere:1", work, aside, store, good)
    ]


def test_what_is_there_needs_no_cluster(store, asked, tmp_path) -> None:
    assert taken(WORK, store, tmp_path) == [
        ("r0", "10.0.0.0", "r0"),
        ("arm/r1", "10.0.0.1", "arm/r1"),
    ]
    assert asked == []
    # What was not moved is not left.
    assert {one.name for one in tmp_path.iterdir()} == {"made", "run"}


@pytest.mark.parametrize(
    "change",
    [
        {"module": "tests.hosts.cubes"},
        {"files": {"job": b"2"}},
        {"tasks": {"r0": b"2 1", "arm/r1": b"3 1"}},
    ],
)
def test_a_piece_of_other_work_is_not_taken(change, store, asked, tmp_path) -> None:
    other = dataclasses.replace(WORK, **change)
    assert taken(other, store, tmp_path) == []
    assert asked == list(other.tasks.values())


def test_a_piece_of_other_code_is_not_taken(
    store, asked, tmp_path, monkeypatch
) -> None:
    ours = module.code()
    later = type(ours)("changed", ours.environment_sha256, ours.vllm, ours.python)
    monkeypatch.setattr(module, "code", lambda: later)
    # As a new process has it.
    assert taken(dataclasses.replace(WORK), store, tmp_path) == []
    assert asked == list(WORK.tasks.values())


def test_a_piece_that_went_wrong_is_made_again(store, asked, tmp_path) -> None:
    def good(name: str, folder: Path) -> bool:
        return name == "r0"

    assert [name for name, *_ in taken(WORK, store, tmp_path, good)] == ["r0"]
    assert asked == [b"3 0"]
