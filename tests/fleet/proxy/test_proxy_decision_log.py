# SPDX-License-Identifier: Apache-2.0
"""A full disk costs the proxy lines of its log, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fleet.proxy.decision_log import DecisionLog
from lab.records import line_file
from lab.records.decisions import DecisionEnd, DecisionsHeader
from lab.records.lines import read_lines

HEADER = DecisionsHeader(policy="linear")


def ended(path: Path) -> list[str]:
    return [end.id for end in read_lines(path, DecisionsHeader, DecisionEnd).records]


async def flushing(log: DecisionLog, use: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(log.flush_forever())
    await use()
    assert not task.done()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_lines_are_lost_while_the_disk_is_full_and_that_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_file, "FLUSH_EVERY_S", 0.01)
    write, full, tried = line_file._write_all, False, 0

    def write_if_room(file, data: bytes) -> None:
        nonlocal tried
        try:
            write(file, data[: len(data) // 2] if full else data)
            if full and data:
                raise OSError(28, "No space left on device")
        finally:
            tried += bool(data)

    monkeypatch.setattr(line_file, "_write_all", write_if_room)
    path = tmp_path / "decisions.jsonl"
    with caplog.at_level(logging.ERROR), DecisionLog(path, HEADER) as log:

        async def use() -> None:
            nonlocal full
            for number, full_now in enumerate([False, True, True, False]):
                full, before = full_now, tried
                log.ended(DecisionEnd(str(number), number, None, status="ok"))
                while tried == before:
                    await asyncio.sleep(0.01)

        asyncio.run(flushing(log, use))
    assert ended(path) == ["0", "3"]
    assert [record.message for record in caplog.records] == [
        f"{path}: lines are lost: [Errno 28] No space left on device"
    ]


def test_what_was_not_flushed_yet_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path, HEADER) as log:
        log.ended(DecisionEnd("a", 0, None, status="ok"))
    assert ended(path) == ["a"]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    with DecisionLog(None, HEADER) as log:
        log.ended(DecisionEnd("a", 0, None, status="ok"))
    assert list(tmp_path.iterdir()) == []
