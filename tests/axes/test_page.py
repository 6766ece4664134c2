# SPDX-License-Identifier: Apache-2.0
"""The page says of each cell a figure or a reason, and is what the records make."""

from __future__ import annotations

import msgspec
import pytest

from kvtax.axes.matrix import Claim, Matrix, read_all_cells, read_matrix
from kvtax.axes.page import PAGE, full_page, summary_page
from kvtax.records.observatory_cell import CellRecord, keep_cell
from kvtax.report import render
from kvtax.verdict.axes import AXES
from tests.axes.cells import made
from tests.verdict.test_axes import curve

MATRIX = Matrix(releases=["0.28.0", "0.32.0"], connectors=["noop", "mooncake_both"])
GROWING = made("mooncake_both", running=curve("running", 2, 900.0))
DEAD = msgspec.structs.replace(
    made("noop", "0.28.0"), error="no | device (vllm/v1/a.py:3)"
)

# One per axis, and the summary.
TABLES = len(AXES) + 1


def text_of(*cells: CellRecord, **changes) -> str:
    """Render the page of `cells`; `changes` go into the matrix."""
    matrix = msgspec.structs.replace(MATRIX, **changes)
    by_name = {(cell.release, cell.connector): cell for cell in cells}
    return render.markdown(full_page(matrix, by_name))


def told(**changes) -> str:
    return text_of(GROWING, DEAD, **changes)


def test_a_cell_that_grows_names_axis_order_and_method():
    text = told()
    assert "**running** (curved)" in text
    assert "`scheduler.build_connector_meta`" in text


def test_a_cell_that_did_not_start_has_its_reason():
    assert "| `noop` | 0.28.0 | no \\| device (vllm/v1/a.py:3) |" in told()


def test_a_cell_that_is_missing_is_not_measured():
    # The summary leaves out a connector that started on no release.
    assert told().count("not measured") == 2 * TABLES - 1


def test_the_short_page_has_a_row_per_connector_of_the_newest_release():
    cells = {(cell.release, cell.connector): cell for cell in (GROWING, DEAD)}
    text = render.markdown(summary_page(MATRIX, cells))
    newest = text[text.index("## Each axis on 0.32.0") :]
    assert "| `mooncake_both` |" in newest and "**" in newest
    assert "| `noop` | " not in newest[: newest.index("## What does not start")]


def test_an_axis_that_a_connector_has_not_has_no_row_of_it():
    short = {axis: us for axis, us in GROWING.means_us.items() if axis != "tier"}
    cell = msgspec.structs.replace(GROWING, means_us=short)
    text = text_of(cell)
    assert text.count("| `mooncake_both` |") == TABLES - 1


def test_a_cell_from_before_there_was_an_axis_says_so():
    old = {axis: us for axis, us in GROWING.means_us.items() if axis != "fragments"}
    levels = {axis: GROWING.levels[axis] for axis in old}
    cell = msgspec.structs.replace(GROWING, means_us=old, levels=levels)
    newer = msgspec.structs.replace(GROWING, release="0.28.0")
    _, fragments = text_of(cell, newer).split("## Fragments", 1)
    (row,) = [
        line for line in fragments.split("## ")[0].splitlines() if "mooncake" in line
    ]
    assert row.endswith("| not measured |")


def test_an_axis_that_no_cell_has_has_no_table():
    means = {axis: us for axis, us in GROWING.means_us.items() if axis != "prompt"}
    levels = {axis: GROWING.levels[axis] for axis in means}
    old = msgspec.structs.replace(GROWING, levels=levels, means_us=means)
    assert "arriving prompt" not in text_of(old)
    assert "arriving prompt" in text_of(GROWING)


def test_a_report_is_answered_with_curve_and_verdict():
    claim = Claim("vLLM #1", "walks", "mooncake_both", "running", "0.32.0")
    (row,) = [line for line in told(claims=[claim]).splitlines() if "vLLM #1" in line]
    assert "256: 9" in row
    assert "**grows**, curved" in row


def test_a_report_can_be_answered_beside_another_config():
    claim = Claim(
        "vLLM #1", "walks", "mooncake_both", "running", "0.32.0", beside="noop"
    )
    flat = made("noop", "0.32.0", noise=0)
    text = text_of(GROWING, flat, claims=[claim])
    (row,) = [line for line in text.splitlines() if "vLLM #1" in line]
    assert "and +0.0 [+0.0, +0.0] of `noop`" in row


def of_hosts(**hosts: str) -> str:
    """The page of two cells that a report sets beside each other."""
    claim = Claim(
        "vLLM #1", "walks", "mooncake_both", "running", "0.32.0", beside="noop"
    )
    cells = [
        msgspec.structs.replace(made(name), host=host) for name, host in hosts.items()
    ]
    return text_of(*cells, claims=[claim])


def test_cells_of_several_hosts_are_marked_and_never_compared():
    text = of_hosts(noop="10.0.0.1", mooncake_both="10.0.0.2")
    assert "| 1 | 10.0.0.1 |" in text
    rows = [
        line for line in text.splitlines() if line.startswith("| `mooncake_both` |")
    ]
    assert len(rows) == TABLES
    assert all("host 2 |" in row for row in rows)
    (row,) = [line for line in text.splitlines() if "vLLM #1" in line]
    assert "`noop` is of another host, and not compared" in row


def test_cells_of_one_host_of_a_cluster_are_compared_and_not_marked():
    text = of_hosts(noop="10.0.0.1", mooncake_both="10.0.0.1")
    (row,) = [line for line in text.splitlines() if "vLLM #1" in line]
    assert "of `noop` |" in row
    assert "<br> host" not in text


def test_a_stand_in_is_said_wherever_the_connector_is_named():
    text = told(stand_ins={"mooncake_cpu_layout": "the layout of a CPU's cache"})
    rows = [line for line in text.splitlines() if line.startswith("| `mooncake_both`")]
    assert len(rows) == TABLES
    assert all("\N{DAGGER}" in row for row in rows)
    assert "(../../patches/README.md#mooncake_cpu_layout): the layout of" in text


@pytest.mark.slow
def test_the_committed_page_is_what_the_committed_cells_make():
    matrix = read_matrix()
    cells = read_all_cells()
    assert PAGE.read_text() == render.markdown(summary_page(matrix, cells))
    # Each cell is on the page.
    assert {release for release, _ in cells} <= set(matrix.releases)
    assert {connector for _, connector in cells} <= set(matrix.connectors)


def test_a_kept_cell_replaces_the_older_one_and_no_other(tmp_path):
    keep_cell(made("noop"), tmp_path)
    keep_cell(made("mooncake_both"), tmp_path)
    keep_cell(msgspec.structs.replace(made("noop"), wall_s=1.0), tmp_path)
    cells = read_all_cells(tmp_path)
    assert {name: cell.wall_s for name, cell in cells.items()} == {
        ("0.32.0", "noop"): 1.0,
        ("0.32.0", "mooncake_both"): 24.0,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["0.32.0.jsonl.xz"]
