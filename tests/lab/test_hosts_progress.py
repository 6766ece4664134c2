# SPDX-License-Identifier: Apache-2.0
"""Progress over hosts accounts for each task once, whoever is lost."""

from __future__ import annotations

from rich.console import Console

from lab.hosts.progress import Progress


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
