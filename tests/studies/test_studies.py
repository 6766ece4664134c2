# SPDX-License-Identifier: Apache-2.0
"""Studies start by name, and their pages have the figures of the committed results."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import jsonschema
import pytest

from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord, keep_cell
from studies.__main__ import pages
from studies.harness import STUDIES
from studies.host_table import __main__ as host_table

NAMES = sorted(file.parent.name for file in STUDIES.glob("*/__main__.py"))


def ended(capsys, monkeypatch, name: str, *arguments: str) -> tuple[int, str, str]:
    """Return exit code and output of `python -m studies.NAME` in this process."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module(f"studies.{name}", run_name="__main__")
    return exit_.value.code, *capsys.readouterr()


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_study_describes_itself_and_is_documented(name, capsys, monkeypatch):
    code, shown, errors = ended(capsys, monkeypatch, name, "--help")
    assert code == 0, errors
    assert f"usage: python -m studies.{name}" in shown
    text = (STUDIES / "README.md").read_text()
    page = STUDIES / name / "README.md"
    link = f"[{name}]({name}/README.md)" if page.exists() else f"[{name}](#{name})"
    assert link in text
    own = page.read_text() if page.exists() else text.partition(f"\n## {name}\n")[2]
    assert f"python -m studies.{name}" in own


@pytest.mark.slow
def test_a_missing_run_is_an_error_that_names_it(tmp_path, capsys, monkeypatch):
    runs = ["--sample", str(tmp_path), "--thousand", str(tmp_path)]
    code, _, errors = ended(capsys, monkeypatch, "reference_study", *runs)
    assert code == 2
    assert "give a finished run of" in errors


@pytest.mark.slow
def test_each_readme_shows_its_committed_result():
    made = pages()
    stale = [str(page) for page, text in made.items() if page.read_text() != text]
    assert any("<!--/figure" in text for text in made.values())
    assert stale == [], "run python -m studies"


SCHEDULER_US, STEP_US, WORKER_SIDE_US = 10.0, 500.0, 7.0


def a_cell() -> CellRecord:
    """Times that are lines; each pass is 1 us slower than the one before."""

    def passes(base: float, slope: float, levels: list[int]) -> list[list[float]]:
        return [[base + slope * x + k for x in levels] for k in range(-4, 5)]

    levels = {
        "running": [1, 64, 256],
        "context": [1_024, 65_536],
        "cache": [256, 16_384],
        "arrivals": [0, 16],
    }
    slopes = {"running": 3.0, "context": 0.0, "cache": 0.02, "arrivals": 40.0}
    return CellRecord(
        release="9.9.9",
        connector="plain",
        provenance={
            "cpu_count": 2,
            "cpu_model": "a CPU",
            "kernel": "6",
            "command_line": "kvtax axes",
            "git_commit": "abc",
            "date_utc": "2026-01-01",
        },
        wall_s=1.0,
        levels=levels,
        means_us={
            axis: {
                "scheduler_us": passes(SCHEDULER_US, slopes[axis], levels[axis]),
                "step_us": passes(STEP_US, slopes[axis], levels[axis]),
                "connector_us": passes(9.0, 0.0, levels[axis]),
                "worker.get_finished_us": passes(WORKER_SIDE_US, 0.0, levels[axis]),
            }
            for axis in levels
        },
    )


def test_a_point_of_the_host_table_is_what_was_running_and_how_long_it_took(tmp_path):
    keep_cell(a_cell(), tmp_path)
    (cell,) = host_table.host_table(tmp_path).cells
    places = [(p.running, p.context_tokens, p.cached_blocks) for p in cell.points]
    assert places == [
        (1, 64, 4),
        (64, 64, 256),
        (256, 64, 1_024),
        (4, 1_024, 256),
        (4, 65_536, 16_384),
        (8, 64, 256),
        (8, 64, 16_384),
    ]
    most = cell.points[2]
    assert most.scheduler_us.value == SCHEDULER_US + 3 * 256
    assert most.host_us.value == most.scheduler_us.value + WORKER_SIDE_US
    assert most.scheduler_us.low < most.scheduler_us.value < most.scheduler_us.high
    assert cell.steps.scheduler.us_per_1k_cached_blocks == pytest.approx(20)


@pytest.mark.slow
def test_the_table_of_the_committed_cells_follows_its_own_schema(tmp_path):
    made = host_table.host_table()
    host_table.write_table(tmp_path / "t.json", made)
    assert read_document(tmp_path / "t.json", host_table.HostTable) == made
    document = json.loads((tmp_path / "t.json").read_text())
    jsonschema.validate(document, document["json_schema"])
    del document["cells"][0]["points"][0]["host_us"]["value"]
    with pytest.raises(jsonschema.ValidationError, match="value"):
        jsonschema.validate(document, document["json_schema"])
