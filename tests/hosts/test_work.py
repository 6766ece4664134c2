# SPDX-License-Identifier: Apache-2.0
"""A store's results of the same work are taken, and each task is accounted for once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from kvtax.hosts import work as module
from kvtax.hosts.progress import Progress
from kvtax.hosts.store import Store, store_of_run
from kvtax.hosts.work import Work, finished_tasks

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
        for one in finished_tasks("nowhere:1", work, aside, store, good)
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


def shown(progress: Progress) -> str:
    """The table, as a terminal has it."""
    console = Console(width=120)
    with console.capture() as captured:
        console.print(progress)
    return captured.get()


def half_done() -> Progress:
    """Of three tasks one is done, one is lost with a host, one fails."""
    progress = Progress(["repeat 0", "repeat 1", "repeat 2"])
    for host in ("a", "b"):
        progress.comes(host)
    progress.begins("a", 0)
    progress.begins("b", 1)
    progress.ends("a", 0)
    progress.begins("a", 2)
    progress.leaves("b", "its agent ended")
    progress.ends("a", 2)
    progress.failed("a")
    return progress


def test_what_a_lost_host_was_doing_is_lost_there_and_done_elsewhere():
    progress = half_done()
    progress.begins("a", 1)
    assert "repeat 1" in shown(progress)
    assert "2 of 3 done" in shown(progress)
    progress.ends("a", 1)
    assert progress.lines() == [
        "a: 3 done, 1 failed",
        "b: 0 done, 1 lost; given up: its agent ended",
    ]


def test_a_host_that_comes_again_is_no_longer_given_up():
    progress = half_done()
    assert "given up: its agent ended" in shown(progress)
    progress.comes("b")
    assert "given up" not in shown(progress)
    assert "3 of 3" not in shown(progress)


def test_elsewhere_than_on_a_terminal_hosts_are_told_at_the_end(capsys):
    progress = Progress(["one"])
    with progress:
        progress.comes("a")
        progress.begins("a", 0)
        assert capsys.readouterr() == ("", "")
        progress.ends("a", 0)
    assert capsys.readouterr().err == "a: 1 done\n"
