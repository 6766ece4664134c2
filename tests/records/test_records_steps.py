# SPDX-License-Identifier: Apache-2.0
"""Step files are read by chunks as by lines, and hold what the patches write."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.files import read_lines
from kvtax.records.steps import (
    ENGINE_COUNTS,
    FIELDS,
    EngineHeader,
    EngineStep,
    first_step,
)
from kvtax.steps import step_file
from kvtax.steps.step_file import StepReader, read_steps
from tests.harness.made_up import call_columns, step_columns, write_steps

HEADER = EngineHeader(clock="CLOCK_MONOTONIC")
STEPS = [
    EngineStep(
        step_id=step_id,
        t_ns=10**14 + step_id,
        schedule_us=50.0 + step_id,
        prefill_tokens=64,
        cache_size=4 + step_id,
    )
    for step_id in range(9)
]
COLUMNS = ("step_id", "t_ns", "schedule_us", "cache_size", "update_us")


def write(path: Path, steps: list[EngineStep], tail: bytes = b"") -> Path:
    lines = [msgspec.json.encode(record) + b"\n" for record in (HEADER, *steps)]
    path.write_bytes(b"".join(lines) + tail)
    return path


def read(path: Path) -> tuple[pl.DataFrame, int]:
    file = read_steps(path, EngineHeader, COLUMNS)
    return file.frame, file.torn_lines


@pytest.fixture(scope="module")
def cut_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cut")


@pytest.mark.slow
@given(cut=st.integers(0, 1_500), chunk=st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_at_any_byte_loses_only_its_torn_last_line(
    cut_folder: Path, cut: int, chunk: int
) -> None:
    path = write(cut_folder / "engine_step.jsonl", STEPS)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    path.write_bytes(whole[: max(header, min(cut, len(whole)))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_file, "CHUNK_BYTES", chunk)
        frame, torn = read(path)
    lines = read_lines(path, EngineHeader, EngineStep)
    assert frame["step_id"].to_list() == [step.step_id for step in lines.records]
    assert torn == lines.torn_lines


@pytest.fixture(params=[1, 100, 8 << 20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of one line, of some lines, and of the whole file."""
    monkeypatch.setattr(step_file, "CHUNK_BYTES", request.param)
    return request.param


def test_many_files_side_by_side_need_no_more_memory_than_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_file, "CHUNK_BYTES", 64 << 10)
    steps = [EngineStep(step_id=i, t_ns=i, step_us=1.0) for i in range(10_000)]
    path = write(tmp_path / "engine_step.jsonl", steps)

    def heights(files: int) -> list[int]:
        reader = StepReader(path, EngineHeader, ["step_id", "t_ns"], files=files)
        return [frame.height for frame in reader]

    alone, many = heights(1), heights(1_000)
    assert sum(alone) == sum(many) == len(steps)
    assert 1_000 * max(many) < 20 * max(alone)


JUNK = [b'{"step_id":9,"sche', b"\0\0\0\0", b'{"step_id":2,"t_ns":"x"}', b'{"a":1}']


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("follows", [b"", b'{"step_id":2,"t_ns":2}\n'])
@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_a_chunk_is_torn_or_named_as_in_a_line(
    tmp_path: Path, junk: bytes, follows: bytes
) -> None:
    path = write(tmp_path / "e", STEPS[:2], junk + b"\n" + follows)
    if not follows and junk in JUNK[:2]:
        assert read_lines(path, EngineHeader, EngineStep).torn_lines == 1
        frame, torn = read(path)
        assert (frame.height, torn) == (2, 1)
        return
    for reader in (read, lambda path: read_lines(path, EngineHeader, EngineStep)):
        with pytest.raises(RecordsError, match=r"e:4: "):
            reader(path)


def test_a_file_without_records_is_an_empty_table(tmp_path: Path) -> None:
    path = write(tmp_path / "e", [])
    frame, torn = read(path)
    assert (frame.columns, frame.height, torn) == (list(COLUMNS), 0, 0)
    assert first_step(path) is None


def test_the_first_step_tells_what_was_cached_before_it(tmp_path: Path) -> None:
    first = first_step(write(tmp_path / "e", STEPS[3:], b"never read"))
    assert first == STEPS[3]
    assert first.found_blocks(block_tokens=16) == 3
    assert EngineStep(step_id=0, t_ns=0).found_blocks(16) is None


@pytest.mark.parametrize("side", ["engine", "worker"])
def test_the_recorder_writes_the_fields_of_the_table(side: str) -> None:
    """It runs inside vLLM, so it declares the records on its own."""
    source = REPOSITORY / "probe" / "kvtax_probe" / f"{side}.py"
    (written,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == f"{side.title()}Step"
    )
    fields = {
        record.target.id: ast.unparse(record.annotation)
        for record in written.body
        if isinstance(record, ast.AnnAssign)
    }
    table = {field.name: field for field in FIELDS if field.side == side}
    # Older recorders took it.
    assert fields.keys() == table.keys()
    for name, annotation in fields.items():
        assert ("float" if table[name].unit == "us" else "int") in annotation, name
        assert ("dict" in annotation) == table[name].by_method


def test_made_up_records_are_read_with_all_counts(tmp_path: Path) -> None:
    ids = np.arange(5)
    times = call_columns({"get_finished": ids * 2.0})
    columns = step_columns("engine", ids, cache_size=ids, **times)
    path = tmp_path / "engine_step.jsonl"
    write_steps(path, EngineHeader(methods=["get_finished"]), columns)
    steps = read_lines(path, EngineHeader, EngineStep).records
    assert [step.cache_size for step in steps] == [0, 1, 2, 3, 4]
    assert steps[3].connector_self_us == {"get_finished": 6.0}
    assert all(getattr(steps[0], name) is not None for name in ENGINE_COUNTS)
    with pytest.raises(TypeError, match="execute_model_us"):
        step_columns("engine", ids, execute_model_us=ids)
