# SPDX-License-Identifier: Apache-2.0
"""Files are read whole, or what is wrong is named; a document is written whole."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib
import inspect
import io
import json
import os
import pkgutil
import threading
from io import FileIO
from pathlib import Path

import msgspec
import pytest
from kvtax_fleet.records.decisions import DecisionRecord

from kvtax import records
from kvtax.cli import Exit, main
from kvtax.cli.fields import formats
from kvtax.records import RecordsError, files
from kvtax.records.files import (
    FLUSH_EVERY_S,
    LineFile,
    read_document,
    read_header,
    read_lines,
    write_document,
    write_whole,
    written_whole,
)
from kvtax.records.formats import described, table
from kvtax.records.requests import DriverEnd, read_requests
from kvtax.records.run import (
    ReadCounts,
    ReadRecord,
    ReadsHeader,
    RunRecord,
    TrialRecord,
)

HEADER = ReadsHeader(reads_per_s=2.0)
READS = [ReadRecord(t_ns=10**14 + n, offered=n, valid=0) for n in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file as its writer leaves it."""
    path = tmp_path / "reads.jsonl"
    with LineFile(path, HEADER) as file:
        for read in READS:
            file.append(read)
    return path


def put(path: Path, *lines: bytes) -> None:
    """Replace the file, from its third line on."""
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    path.write_bytes(b"".join([*kept, *lines]))


def test_a_file_cut_at_any_byte_loses_only_its_torn_last_line(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(whole.index(b"\n") + 1, len(whole) + 1):
        path.write_bytes(whole[:size])
        lines = read_lines(path, ReadsHeader, ReadRecord)
        complete = whole[:size].count(b"\n")
        assert lines.header == HEADER
        assert lines.records == READS[: complete - 1]
        assert lines.torn_lines == (size > 0 and whole[size - 1 : size] != b"\n")


@pytest.mark.parametrize(
    "junk", [b'{"t_ns":9,"off\n', b'{"t_ns":"nine"}\n', b"[]\n", b"\n"]
)
def test_a_bad_line_in_the_middle_is_named_by_file_and_line(
    path: Path, junk: bytes
) -> None:
    put(path, junk, b'{"t_ns":9,"offered":0,"valid":0}\n')
    with pytest.raises(RecordsError, match=r"reads\.jsonl:3: "):
        read_lines(path, ReadsHeader, ReadRecord)


def test_another_schema_is_refused_and_both_are_named(path: Path) -> None:
    path.write_text('{"schema":"kvtax.reads/9"}\n')
    for read in (
        lambda: read_lines(path, ReadsHeader, ReadRecord),
        lambda: read_header(path, ReadsHeader),
    ):
        with pytest.raises(RecordsError, match=r"kvtax\.reads/9.*kvtax\.reads/1"):
            read()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("head", [b"", b'{"schema":"kvtax.re', b"{\n"])
def test_a_file_without_a_whole_header_is_refused(
    path: Path, head: bytes, strict: bool
) -> None:
    path.write_bytes(head)
    with pytest.raises(RecordsError, match=r"reads\.jsonl:1: no header line"):
        read_lines(path, ReadsHeader, ReadRecord, strict=strict)


def test_only_as_much_is_read_as_is_asked_for(path: Path) -> None:
    put(path, b"not read\n", b"\n")
    assert read_lines(path, ReadsHeader, ReadRecord, limit=1).records == READS[:1]
    assert read_header(path, ReadsHeader) == HEADER


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="none: missing"):
        read_lines(tmp_path / "none", ReadsHeader, ReadRecord)


def test_deep_and_packed_documents_are_bad_input(tmp_path: Path, monkeypatch) -> None:
    deep = tmp_path / "deep.json"
    schema = files.schema_of(ReadsHeader)
    deep.write_text(f'{{"schema":"{schema}","a":{"[" * 100_000}{"]" * 100_000}}}')
    with pytest.raises(RecordsError, match=r"deep\.json: .* nested too deeply"):
        read_document(deep, ReadsHeader)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("[" * 100_000 + "\n")
    with pytest.raises(RecordsError, match=r"lines\.jsonl:1: bad record"):
        read_lines(lines, ReadsHeader, ReadRecord)
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(RecordsError, match="MB of JSON"):
        read_document(packed, ReadsHeader)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's link")
def test_no_file_is_written_through_another_users_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    link = tmp_path / "look.html"
    link.symlink_to(precious)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(OSError, match="another user"):
        files.write_whole(link, b"page")
    assert precious.read_text() == "kept"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.chown(pipe, 65534, 65534)
    with pytest.raises(OSError, match="another user"):
        files.write_whole(pipe, b"page")
    os.chown(link, os.geteuid(), -1, follow_symlinks=False)
    files.write_whole(link, b"page")
    assert precious.read_bytes() == b"page"


def test_a_line_file_never_overwrites(path: Path) -> None:
    with pytest.raises(FileExistsError):
        LineFile(path, HEADER)


@pytest.mark.slow
def test_no_line_is_lost_when_flushing_ends_before_the_disk_comes_to_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines.jsonl"
    busy = threading.Event()

    async def flush_and_stop() -> None:
        with LineFile(path, HEADER) as file:
            file._writer.submit(busy.wait)
            file.append({"n": 1})
            flushing = asyncio.create_task(file.flush_forever())
            await asyncio.sleep(1.5 * FLUSH_EVERY_S)
            flushing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flushing
            file.append({"n": 2})
            busy.set()

    asyncio.run(flush_and_stop())
    assert path.read_bytes().splitlines()[1:] == [b'{"n":1}', b'{"n":2}']


class FullDisk(FileIO):
    """A file on a disk that has no room for one line, and then has again."""

    room = 1 << 20

    def write(self, data: bytes) -> int:
        if self.room == 0:
            self.room = 1 << 20
            raise OSError(28, "No space left on device")
        taken = super().write(data[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_costs_the_lines_of_a_flush_and_tears_none(tmp_path: Path) -> None:
    path = tmp_path / "reads.jsonl"
    with LineFile(path, HEADER) as file:
        file._file.close()
        file._file = FullDisk(path, "r+")
        file._file.seek(0, io.SEEK_END)
        file.append(READS[0])
        file.flush().result()
        file._file.room = 30
        file.append(READS[1])
        with pytest.raises(OSError, match="No space left"):
            file.flush().result()
        file.append(READS[2])
        file.flush().result()
    lines = read_lines(path, ReadsHeader, ReadRecord)
    assert (lines.records, lines.torn_lines) == ([READS[0], READS[2]], 0)


def test_lines_that_are_lost_at_the_end_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "reads.jsonl"
    with (
        pytest.raises(OSError, match="No space left"),
        LineFile(path, HEADER) as file,
    ):
        file._file.close()
        file._file = FullDisk(path, "r+")
        file._file.room = 0
        file.append(READS[0])


def test_what_an_older_writer_left_out_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [
        {"schema": "kvtax.requests/1", "scheduled": 1, "later": "field"},
        {"type": "phase", "name": "growth", "start_ns": 1},
        {"type": "request", "id": 0, "phase": "growth", "prompt_tokens": 8},
        {"type": "end", "scheduled": 1, "ok": 0, "failed": 0, "cancelled": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = read_requests(path)
    assert lines.requests[0].sent_ns is None
    assert lines.phases[0].reset_ns is None
    assert lines.end is not None and lines.end.lag_ms is None


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
    tmp_path: Path,
) -> None:
    path = tmp_path / "trial.json"
    write_document(path, {"schema": "old"})

    with pytest.raises(OSError, match="disk full"), written_whole(path) as file:
        file.write(b"new")
        raise OSError("disk full")
    assert msgspec.json.decode(path.read_bytes()) == {"schema": "old"}


def test_a_device_is_written_to_and_a_link_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_whole(Path("/dev/full"), b"x")
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    write_whole(link, b"x")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target"}


@pytest.mark.slow
def test_a_file_that_unpacks_to_gigabytes_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(bytes(66 << 20)))
    with pytest.raises(RecordsError, match="over 200 times its size"):
        read_document(tmp_path / "run.json", RunRecord)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link to another user")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    os.lchown(link, 65_534, 65_534)
    with pytest.raises(OSError, match="another user"):
        write_whole(link, b"x")
    assert target.read_bytes() == b"precious"


FORMATS = {form.name: form for form in formats()}


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_of_a_file_is_described(name, capsys):
    """A struct without a description raises."""
    assert main(["look", "--fields", name.replace("*", "x")]) == Exit.GOOD
    assert capsys.readouterr().out == described(FORMATS[name])


def test_every_document_of_the_core_has_a_format():
    tagged = set()
    for module in pkgutil.iter_modules(records.__path__, "kvtax.records."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
                config = kind.__struct_config__
                tagged |= {config.tag} if config.tag_field == "schema" else set()
    first = {form.kinds[0].__struct_config__.tag for form in FORMATS.values()}
    assert tagged <= first


@pytest.mark.slow
def test_structs_inside_of_others_are_described():
    page = described(FORMATS["run.json"])
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert {"## RunRecord", "## AimOfConfig"} <= set(headings)


def test_a_file_is_found_by_its_path_packed_or_not(capsys):
    for path in ("run/plain/r0/worker_step.r3.jsonl", "hosts/mine.json", "run.json.gz"):
        assert main(["look", "--fields", path]) == Exit.GOOD
        assert capsys.readouterr().out.startswith("# ")


def test_an_unknown_file_is_bad_input_and_the_known_ones_are_listed(capsys):
    assert main(["look", "--fields", "steps.csv"]) == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert "steps.csv" in error and "engine_step.jsonl" in error


class Undocumented(msgspec.Struct):
    """One field is described, the other is not."""

    known: int
    """A description."""
    unknown: int


def test_a_field_without_a_description_makes_no_table():
    with pytest.raises(KeyError, match="unknown"):
        table(Undocumented)


def test_a_table_has_inherited_fields_and_the_names_of_the_file():
    rows = table(DriverEnd).splitlines()
    assert rows[2] == "| `scheduled` | Requests that were to be sent. |"
    assert rows[-1].startswith("| `driver_cpu_s` | ")
    assert "| `class` | `WARM`, `MEDIUM`, `HEAVY` or `HUGE`" in table(DecisionRecord)
