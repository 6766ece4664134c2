# SPDX-License-Identifier: Apache-2.0
"""A document is read and checked, and written whole or not at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from kvtax.records import RecordsError
from kvtax.records.files import read_document, write_document, write_whole
from kvtax.records.run import ReadCounts, TrialRecord

FACTS = {"config": "noop", "repeat": 1, "num_blocks": 17_500, "block_size": 16}


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    reads = ReadCounts(reads=3, blocks_offered=9, blocks_valid=8, seconds=2.0)
    trial = TrialRecord(**FACTS, status="failed", error="why", reads=reads)
    write_document(path, trial)
    assert json.loads(path.read_bytes())["schema"] == "kvtax.trial/1"
    assert read_document(path, TrialRecord) == trial


def test_a_document_that_gzip_compressed_is_read_and_a_damaged_one_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trial.json"
    packed = tmp_path / "trial.json.gz"
    trial = TrialRecord(**FACTS, status="ok")
    write_document(path, trial)
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert read_document(path, TrialRecord) == trial
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(RecordsError, match=r"trial\.json: "):
        read_document(path, TrialRecord)


def test_a_trial_has_no_outcome_unless_it_is_given_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="status"):
        TrialRecord(**FACTS)
    path = tmp_path / "trial.json"
    path.write_text(json.dumps({"schema": "kvtax.trial/1"} | FACTS))
    with pytest.raises(RecordsError, match=r"trial\.json: .*`status`"):
        read_document(path, TrialRecord)


def test_another_schema_is_refused_and_both_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text(json.dumps({"schema": "kvtax.trial/9", "all": "else is new"}))
    with pytest.raises(RecordsError, match=r"trial/9'.*trial/1'"):
        read_document(path, TrialRecord)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "missing"), ("{", "truncated"), ("[]", "array"), ("{}", "None")],
)
def test_what_is_no_document_is_named(
    tmp_path: Path, content: str | None, why: str
) -> None:
    path = tmp_path / "trial.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecordsError, match=f"trial.json: .*{why}"):
        read_document(path, TrialRecord)


def test_a_writer_that_fails_leaves_the_old_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trial.json"
    write_document(path, {"schema": "old"})

    def half(self: Path, content: bytes) -> None:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new content")
    assert msgspec.json.decode(path.read_bytes()) == {"schema": "old"}


def test_a_device_is_written_to_and_a_link_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_whole(Path("/dev/full"), b"x")
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_whole(link, b"x")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target"}
