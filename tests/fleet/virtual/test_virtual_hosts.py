# SPDX-License-Identifier: Apache-2.0
"""What a host takes, from what was measured on it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fleet.virtual.host_cells import step_times
from fleet.virtual.hosts import main
from lab.paths import CONFIGS, REPOSITORY
from lab.records.documents import read_document, write_document
from lab.records.host_times import HostTimes, StepTime
from lab.records.observatory_cell import CellRecord

LEVELS = {
    "running": [1, 64, 128],
    "arrivals": [0, 8, 16],
    "context": [1_024, 32_768, 65_536],
    "cache": [256, 8_192, 16_384],
}
WALK_US = 0.0856
# A request of 64 tokens has 4 cached blocks, and of 4 requests a token each has 1/4.
PER_UNIT_US = {
    "running": 3.0 + 4 * WALK_US,
    "arrivals": 50.0,
    "context": 0.004 + WALK_US / 4,
    "cache": WALK_US,
}
COMMITTED = sorted((CONFIGS / "hosts").glob("*.json"))


def cell(folder: Path, scheduler_base_us: float, worker_us: float) -> None:
    """A cell of an engine whose scheduler grows along every axis, its worker not."""
    means_us = {}
    for axis, levels in LEVELS.items():
        us = [scheduler_base_us + PER_UNIT_US[axis] * level for level in levels]
        passes = {"scheduler_us": us, "step_us": [one + worker_us for one in us]}
        means_us[axis] = {name: [values] * 3 for name, values in passes.items()}
    record = CellRecord(
        release="0.18.1",
        connector="made_up",
        provenance={},
        wall_s=1,
        levels=LEVELS,
        means_us=means_us,
    )
    write_document(folder / "made_up.json", record)


def test_what_grows_in_a_cell_grows_so_in_the_host_s_times(tmp_path: Path) -> None:
    cell(tmp_path, 60, 900)
    found = step_times(tmp_path)["made_up"]
    assert found.worker == StepTime(base_us=900)
    assert msgspec.structs.asdict(found.scheduler) == pytest.approx(
        {
            "base_us": 60,
            "us_per_request": 3,
            "us_per_new_request": 50,
            "us_per_1k_context_tokens": 1,
            "us_per_1k_cached_blocks": 85.6,
        }
    )


def test_a_folder_without_cells_is_an_error_that_names_it(tmp_path: Path, capsys):
    told = ["--cells", str(tmp_path), "--summary", "-", str(tmp_path / "out.json")]
    assert main(told) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_host_s_steps_are_those_of_the_committed_cells(path: Path) -> None:
    cells = REPOSITORY / "docs" / "results" / "observatory" / "0.18.1"
    assert read_document(path, HostTimes).steps == step_times(cells)
