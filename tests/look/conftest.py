# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from kvtax import cli
from kvtax.look.digest import StepDigest
from kvtax.look.instances import Instance, read_instances
from kvtax.steps.parts import STEP_PARTS
from tests.look.made_up_server import Server, served


@pytest.fixture
def server(tmp_path) -> Server:
    return Server(tmp_path / "records")


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    """Records of 400 steps and 50 requests, which no test changes."""
    return served(tmp_path_factory.mktemp("written") / "records").write()


@pytest.fixture
def records(tmp_path, written) -> Path:
    """A copy of the records, to be changed."""
    return shutil.copytree(written, tmp_path / "records")


@pytest.fixture(scope="session")
def whole(written) -> Instance:
    """The instance of the unchanged records."""
    return only(written)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the terminal is broken."""
    monkeypatch.setenv("COLUMNS", "100000")


def digest_of(steps: pl.DataFrame) -> StepDigest:
    """Sum up steps of 100 us each, of which the table has some columns."""
    rest = {
        "step_id": pl.int_range(pl.len()),
        "t_ns": 100_000 * pl.int_range(pl.len()),
        "end_ns": 100_000 * pl.int_range(1, pl.len() + 1),
        "execute_model_us": pl.lit(1.0),
        **{f"{part}_us": pl.lit(100.0) for part in ("step", "alone", "followed")},
        **{name: pl.lit(1.0) for name in ("scheduled", "waiting", *STEP_PARTS)},
    }
    missing = {name: of for name, of in rest.items() if name not in steps.columns}
    digest = StepDigest()
    digest.add(steps.with_columns(**missing))
    return digest


def main(arguments: list[str]) -> int:
    """Run `kvtax look` in this process; return its exit code."""
    return cli.main(["look", *arguments])


def only(folder: Path) -> Instance:
    """Read the instance of a folder that has one."""
    ((instance,), warnings) = read_instances(folder)
    assert warnings == []
    return instance


def page_data(page: Path) -> dict:
    data = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(data)


def flat(sections: list[dict]) -> Iterator[dict]:
    """Yield sections, also those behind a click."""
    for section in sections:
        yield section
        yield from flat(section.get("sections", []))
