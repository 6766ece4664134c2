# SPDX-License-Identifier: Apache-2.0
"""A host of virtual time is made of measured cells."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord, keep_cell
from studies.host_table.host import step_times, write_host_times

from kvtax_fleet.paths import CONFIGS
from kvtax_fleet.records.host_times import HostTimes, StepTime, StepTimes

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
        passes = {"scheduler_us": us, "step_us": [value + worker_us for value in us]}
        means_us[axis] = {name: [values] * 3 for name, values in passes.items()}
    record = CellRecord(
        release="0.18.1",
        connector="made_up",
        provenance={},
        wall_s=1,
        levels=LEVELS,
        means_us=means_us,
    )
    keep_cell(record, folder)


def test_slopes_of_a_cell_are_slopes_of_the_hosts_times(tmp_path: Path) -> None:
    cell(tmp_path, 60, 900)
    times = step_times(tmp_path / "0.18.1.jsonl.xz")["made_up"]
    assert times.worker == StepTime(base_us=900)
    assert msgspec.structs.asdict(times.scheduler) == pytest.approx(
        {
            "base_us": 60,
            "us_per_request": 3,
            "us_per_new_request": 50,
            "us_per_1k_context_tokens": 1,
            "us_per_1k_cached_blocks": 85.6,
        }
    )


def test_a_missing_file_of_cells_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match=str(tmp_path)):
        write_host_times(tmp_path / "out.json", "-", tmp_path / "none", None)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_host_s_steps_are_those_of_the_committed_cells(path: Path) -> None:
    """Or nothing, where a profile's forward is of whole steps."""
    cells = REPOSITORY / "studies" / "observatory" / "0.18.1.jsonl.xz"
    steps = read_document(path, HostTimes).steps
    if set(steps.values()) != {StepTimes()}:
        assert steps == step_times(cells)
