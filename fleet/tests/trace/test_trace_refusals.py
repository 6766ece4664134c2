# SPDX-License-Identifier: Apache-2.0
"""A bad trace is refused with file and line; an output is whole or not there."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet.tests.trace.trace_commands import (
    CHAT,
    CONVERSATION,
    MOONCAKE,
    REQUEST,
    SESSION,
    SESSION_B,
    fails,
    header,
    put,
)
from tests.proc.living import eventually

from kvtax_fleet.trace import (
    Request,
    TraceError,
    read_trace,
    trace_file,
    write_trace,
)
from kvtax_fleet.trace.trace_file import SCHEMA

pytestmark = pytest.mark.usefixtures("signals")


def test_a_missing_or_an_empty_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere: No such file"):
        list(read_trace(tmp_path / "nowhere"))
    with pytest.raises(TraceError, match=r"t: the file is empty"):
        list(read_trace(put(tmp_path / "t", end="")))


def edit(row: dict, **changes: object) -> dict:
    return {**row, **changes}


def untimed(row: dict, **changes: object) -> dict:
    return {name: row[name] for name in row if name != "timestamp"} | changes


def with_call(**changes: object) -> dict:
    first, second, agent, last = SESSION["requests"]
    return edit(SESSION, requests=[first, {**second, **changes}, agent, last])


def with_nested(**changes: object) -> dict:
    first, second, agent, last = SESSION["requests"]
    inner, *rest = agent["requests"]
    agent = {**agent, "requests": [{**inner, **changes}, *rest]}
    return edit(SESSION, requests=[first, second, agent, last])


REFUSED = {
    "no known fields": ([{"a": 1}], ["line 1", "fields a", "mooncake"]),
    "not an object": (["[1]"], ["line 1", "object"]),
    "another schema": (
        [{"schema": "kvtax.trace/2"}],
        ["line 1", "'kvtax.trace/2'", SCHEMA],
    ),
    "another tool's schema": ([{"schema": "x/2"}], ["line 1", "no known", "schema"]),
    "an unknown field": ([header(), edit(REQUEST, x=1)], ["line 2", "`x`"]),
    "a missing field": ([header(), {"arrival_s": 0}], ["line 2", "session"]),
    "a turn left out": ([header(), edit(REQUEST, turn=1)], ["line 2", "turn 0 should"]),
    "a turn twice": ([header(), REQUEST, REQUEST], ["line 3", "turn 1 should be"]),
    "fewer than counted": (
        [header(requests=2), REQUEST],
        ["line 2", "after 1", "torn"],
    ),
    "two block sizes": (
        [header(), REQUEST, edit(REQUEST, session="b", block_tokens=20)],
        ["line 3", "blocks of 20 tokens after blocks of 16"],
    ),
    "an older request": (
        [header(), REQUEST, edit(REQUEST, session="b", arrival_s=1.4)],
        ["line 3", "arrives at 1.4 s", "1.5 s", "sort"],
    ),
    "a negative time": ([header(), edit(REQUEST, arrival_s=-1)], ["line 2", ">= 0"]),
    "a time that is none": (
        [header(), edit(REQUEST, arrival_s=float("nan"))],
        ["line 2", "invalid"],
    ),
    "an endless time": (
        [header(), json.dumps(REQUEST).replace("1.5", "1e999")],
        ["line 2", "out of range"],
    ),
    "a negative think time": (
        [header(), edit(REQUEST, think_s=-1)],
        ["line 2", ">= 0"],
    ),
    "no input": ([header(), edit(REQUEST, input_tokens=0, hashes=[])], ["line 2"]),
    "a negative output": ([header(), edit(REQUEST, output_tokens=-1)], ["line 2"]),
    "a hash that is none": ([header(), edit(REQUEST, hashes=[-1, 2])], ["line 2"]),
    "a hash too big": ([header(), edit(REQUEST, hashes=[2**63, 2])], ["line 2"]),
    "half a token": ([header(), edit(REQUEST, input_tokens=40.5)], ["line 2", "int"]),
    "too few blocks": (
        [header(), edit(REQUEST, hashes=[7])],
        ["line 2", "1 blocks of 16 tokens are 16", "40", "--block-tokens"],
    ),
    "mooncake, another block size": (
        [MOONCAKE, edit(MOONCAKE, input_length=9000)],
        ["line 2", "3 blocks of 512 tokens are 1536 tokens", "9000"],
    ),
    "mooncake, just too few tokens": (
        [edit(MOONCAKE, input_length=1023)],
        ["line 1", "1023"],
    ),
    "mooncake, a text as hash": ([edit(MOONCAKE, hash_ids=["x"])], ["line 1", "str"]),
    "mooncake, back in time": (
        [MOONCAKE, edit(MOONCAKE, timestamp=0)],
        ["line 2", "sort"],
    ),
    "bailian, a chat twice": ([CHAT, CHAT], ["line 2", "chat_id 5 is there twice"]),
    "bailian, another block size": ([edit(CHAT, input_length=99)], ["line 1", "99"]),
    "bailian, no hashes": (
        [{name: CHAT[name] for name in CHAT if name != "hash_ids"}],
        ["line 1", "required", "hash_ids"],
    ),
    "an id of a chat, and no trace": ([{"chat_id": 1}], ["line 1", "no known"]),
    "mooncake, a first turn without a time": (
        [MOONCAKE, untimed(MOONCAKE, session_id="a", delay=5)],
        ["line 2", "no time of arrival", "delay", "session_id"],
    ),
    "mooncake, a delay after nothing": (
        [MOONCAKE, untimed(MOONCAKE, delay=5)],
        ["line 2", "no time of arrival"],
    ),
    "mooncake, a delayed turn's blocks": (
        [
            edit(MOONCAKE, session_id="a"),
            untimed(MOONCAKE, session_id="a", delay=5, input_length=9000),
            MOONCAKE,
        ],
        ["line 2", "3 blocks of 512 tokens", "9000"],
    ),
    "sessions, another scope": (
        [SESSION, edit(SESSION_B, hash_id_scope="global")],
        ["line 2", "'global'"],
    ),
    "sessions, no requests": ([edit(SESSION, requests=[])], ["line 1", "without"]),
    "sessions, twice": ([SESSION, SESSION], ["line 2", "session 'a' is there twice"]),
    "sessions, two block sizes": (
        [SESSION_B, edit(SESSION, block_size=32)],
        ["line 2", "blocks of 32 tokens after blocks of 64"],
    ),
    "sessions, another block size": (
        [edit(SESSION, block_size=16)],
        ["line 1", "session 'a'", "at 0.5 s", "2 blocks of 16 tokens", "130"],
    ),
    "sessions, back in time": ([with_call(t=0.25)], ["line 1", "0.25 s", "0.5 s"]),
    "sessions, a hash that is none": (
        [SESSION_B, with_call(hash_ids=[1, "b", 3])],
        ["line 2", "hash_ids", "str"],
    ),
    "sessions, no input": ([with_call(**{"in": 0, "hash_ids": []})], ["no input"]),
    "sessions, within a sub-agent": (
        [with_nested(hash_ids=[1, 2, 3])],
        ["line 1", "session 'a.explore'", "192", "64"],
    ),
    "not JSON": ([MOONCAKE, "{"], ["line 2", "mend or remove"]),
    "an empty line": ([MOONCAKE, "", MOONCAKE], ["line 2", "blank: remove it"]),
    "an array": (["[" + json.dumps(MOONCAKE) + "]"], ["line 1", "a JSON array"]),
    "a printed array": (["[", json.dumps(MOONCAKE), "]"], ["line 1", "a JSON array"]),
    "another tool's workload": (
        [{"timestamp": 0, "requests": [{"prompt": "a", "output_length": 1}]}],
        ["no known trace format", "timestamp, requests"],
    ),
    "a table": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "0,5,6"],
        ["line 1", "no object in JSON, as in CSV"],
    ),
    "a printed object": (
        ["{", '  "timestamp": 0', "}"],
        ["line 1", "does not end in its line", "jq -c ."],
    ),
    "mooncake without one field": (
        [{name: MOONCAKE[name] for name in MOONCAKE if name != "output_length"}],
        ["line 1", "no known", "of mooncake without output_length"],
    ),
    "an abyss": ([MOONCAKE, '{"x":' + "[" * 100_000], ["line 2", "recursion"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_what_it_says_is_refused_with_its_place(tmp_path, what):
    rows, says = REFUSED[what]
    path = put(tmp_path / "t.jsonl", *rows)
    with pytest.raises(TraceError) as refusal:
        list(read_trace(path))
    for part in [str(path), *says]:
        assert part in str(refusal.value)


@pytest.mark.parametrize("kept", range(1, len(json.dumps(MOONCAKE)), 7))
def test_a_torn_line_is_refused(tmp_path, kept):
    row = json.dumps(MOONCAKE)
    path = put(tmp_path / "t", MOONCAKE, row[:kept], end="")
    with pytest.raises(TraceError, match=r"line 2: the file ends within the line"):
        list(read_trace(path))


def test_a_packed_line_is_not_unpacked_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "LONGEST_LINE", 1 << 20)
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(b"0" * (1 << 22)))
    with pytest.raises(TraceError, match=r"line 1: over 1 MB"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (MOONCAKE | {"output_length": None}, "got `null`.*output_length.*mend"),
        ("[1]", "a JSON array"),
    ],
)
def test_a_whole_last_line_is_refused_for_what_it_says(tmp_path, last, why):
    path = put(tmp_path / "t", MOONCAKE, last, end="")
    with pytest.raises(TraceError, match=rf"line 2: .*{why}") as refusal:
        list(read_trace(path))
    assert "torn" not in str(refusal.value)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(MOONCAKE).encode() + b"\n")
    assert len(list(read_trace(path))) == 1


FOREIGN = {
    "zstd": b"\x28\xb5\x2f\xfd\x04\x00\n",
    "bzip2": bz2.compress(b"{}"),
    "twice": gzip.compress(gzip.compress(b"{}")),
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    "zip": b"PK\x03\x04\x14\x00",
    "Parquet": b"PAR1\x15\x04",
    "UTF-16": (json.dumps(MOONCAKE) + "\n").encode("utf-16"),
    "UTF-16 ": (json.dumps(MOONCAKE) + "\n").encode("utf-16-le"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_kind_is_named_for_what_it_is(kind, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_bytes(FOREIGN[kind])
    fails(capsys, "line 1: no JSON lines, but", "stats", path)
    with pytest.raises(TraceError, match=kind.strip()):
        list(read_trace(path))


def test_a_pipe_is_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    row = json.dumps(MOONCAKE).encode() + b"\n"
    with ThreadPoolExecutor(1) as writer:
        writer.submit(pipe.write_bytes, gzip.compress(row * 3))
        assert len(list(read_trace(pipe))) == 3


def test_a_pipe_as_output_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        text = reader.submit(pipe.read_bytes)
        write_trace(pipe, {"requests": 1}, [Request(0.0, "a", 0, 1, 1, [], 16)])
        assert text.result().count(b"\n") == 2
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_last_line_without_its_end_is_whole_if_it_can_be_read(tmp_path):
    assert len(list(read_trace(put(tmp_path / "t", MOONCAKE, MOONCAKE, end="")))) == 2


@pytest.mark.parametrize("packing", ["gz", "xz"])
@pytest.mark.parametrize("lost", [0, 1, 8, 9, 100])
def test_incomplete_or_damaged_packed_data_is_refused(tmp_path, packing, lost):
    path = put(tmp_path / f"t.{packing}", *[MOONCAKE] * 2000)
    data = bytearray(path.read_bytes())
    if not lost:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data[: len(data) - lost])
    with pytest.raises(TraceError, match=r"line \d+" if not lost else "or damaged"):
        list(read_trace(path))


def test_a_text_that_is_none_is_refused(tmp_path):
    path = tmp_path / "t"
    row = json.dumps({**REQUEST, "session": "???"}).encode()
    path.write_bytes(
        json.dumps(header()).encode() + b"\n" + row.replace(b"???", b"\xff")
    )
    with pytest.raises(TraceError, match="line 2"):
        list(read_trace(path))


@pytest.mark.slow
def test_nothing_is_written_of_a_torn_trace(tmp_path, capsys):
    torn = tmp_path / "torn.gz"
    torn.write_bytes(CONVERSATION.read_bytes()[:-500])
    copied = tmp_path / "copied"
    with pytest.raises(TraceError, match="incomplete or damaged"):
        write_trace(copied, {"requests": 12_031}, read_trace(torn))
    fails(capsys, "incomplete or damaged", "stats", torn)
    assert list(tmp_path.iterdir()) == [torn]


def test_an_output_that_cannot_be_written_is_an_error(tmp_path, capsys):
    trace, out = put(tmp_path / "t", MOONCAKE), tmp_path / "nowhere" / "t"
    fails(capsys, "No such file", "sample", trace, out, "--requests", 1)


def test_an_older_output_stays_if_writing_fails(tmp_path):
    out = tmp_path / "t"
    out.write_text("older")
    with pytest.raises(TraceError, match="1 requests came, 2 were counted"):
        write_trace(out, {"requests": 2}, [Request(0.0, "a", 0, 1, 1, [], 16)])
    assert out.read_text() == "older"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_command_leaves_no_partial_trace(tmp_path, number):
    lines = (edit(MOONCAKE, timestamp=second) for second in range(50_000))
    trace, folder = put(tmp_path / "trace", *lines), tmp_path / "out"
    folder.mkdir()
    out = folder / "t.jsonl"
    command = [sys.executable, "-m", "kvtax", "trace", "sample", trace, out]
    command += ["--requests", "50000"]
    process = subprocess.Popen(command)
    try:
        eventually(lambda: any(p.stat().st_size > 0 for p in folder.iterdir()))
        process.send_signal(number)
        status = process.wait(300)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    if number != signal.SIGKILL:
        assert status == 128 + number
        assert not list(folder.iterdir())
