# SPDX-License-Identifier: Apache-2.0
"""The page says of each cell a figure or a reason, and is what the records make."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtax.axes import cell, page
from kvtax.axes.cell import not_in_release, reason
from kvtax.axes.matrix import (
    RESULTS,
    Claim,
    Matrix,
    SourcesResult,
    SourcesRow,
    compared,
    read_all_cells,
    read_matrix,
)
from kvtax.axes.page import (
    ARROW,
    PAGE,
    summary_page,
    with_releases_of,
)
from kvtax.engine import ServerError
from kvtax.engine.connector import load_connector, own_connector
from kvtax.engine.installation import installation
from kvtax.records.estimate import Estimate
from kvtax.records.observatory_cell import CellRecord, Idle, keep_cell
from kvtax.report import render
from kvtax.report.markdown import TIMES
from kvtax.verdict.axes import AXES
from tests.harness.made_up import made
from tests.verdict.test_axes import curve

MATRIX = Matrix(
    releases=["0.28.0", "0.32.0"], connectors=["noop", "mooncake_both"], noop="noop"
)
GROWING = made("mooncake_both", running=curve("running", 2, 900.0))
DEAD = msgspec.structs.replace(
    made("noop", "0.28.0"), error="no | device (vllm/v1/a.py:3)"
)

# Costs idle, and the axes of the newest release.
TABLES = 2


def text_of(*cells: CellRecord, **changes) -> str:
    """Render the page of `cells`; `changes` go into the matrix."""
    matrix = msgspec.structs.replace(MATRIX, **changes)
    by_name = {(cell.release, cell.connector): cell for cell in cells}
    return render.markdown(summary_page(matrix, by_name))


def told(**changes) -> str:
    return text_of(GROWING, DEAD, **changes)


def test_a_cell_has_its_axis_and_shape_or_a_reason():
    text = told()
    assert "**running** (curved)" in text
    assert "| `noop` | 0.28.0 | no \\| device (vllm/v1/a.py:3) |" in text
    # A connector that started on no release is left out.
    assert text.count("not measured") == 1


def test_the_short_page_has_a_row_per_connector_of_the_newest_release():
    cells = {(cell.release, cell.connector): cell for cell in (GROWING, DEAD)}
    name = (GROWING.release, GROWING.connector)
    idle = Idle(steps_per_s=12.4, cpu_ms_per_s=3.26)
    cells[name] = msgspec.structs.replace(GROWING, idle=idle)
    text = render.markdown(summary_page(MATRIX, cells))
    assert "| 3.3 ms, 12 steps |" in text
    newest = text[text.index("## Each axis on 0.32.0") :]
    newest = newest[: newest.index("\n## ")]
    assert "| `mooncake_both` |" in newest and "**" in newest
    assert "| `noop` | " not in newest


def test_a_cell_beside_a_no_op_leads_with_the_ratio_of_their_steps():
    def steps(us: float) -> dict[str, dict[str, list[list[float]]]]:
        # Each pass is on a machine twice as slow as the one before.
        return {
            axis: {"step_us": [[us * 2**k] * len(told.levels) for k in range(6)]}
            for axis, told in AXES.items()
        }

    means = {
        axis: of | steps(300.0)[axis]
        for axis, of in made("mooncake_both").means_us.items()
    }
    cell = msgspec.structs.replace(
        made("mooncake_both"), means_us=means, noop_us=steps(200.0)
    )
    cells = {(cell.release, cell.connector): cell}
    text = render.markdown(summary_page(MATRIX, cells))
    idle = f"{TIMES}1.50 [1.50, 1.50] <br> 10 µs |"
    assert f"| `mooncake_both` | not measured | {idle}" in text
    ends = f"{TIMES}1.50 {ARROW} 1.50 <br> 10 {ARROW} 10"
    assert text.count(ends) == len(AXES)


def test_an_axis_that_no_cell_has_has_no_column():
    means = {name: us for name, us in GROWING.means_us.items() if name != "prompt"}
    older = msgspec.structs.replace(GROWING, means_us=means)
    assert "| prompt |" not in text_of(older)
    assert "| prompt |" in text_of(GROWING)


CLAIM = Claim("vLLM #1", "walks", "mooncake_both", "running", "0.32.0")
BESIDE_NOOP = msgspec.structs.replace(CLAIM, beside="noop")


def answer(text: str) -> str:
    """Return the row of the page that answers the claim."""
    (row,) = [line for line in text.splitlines() if "vLLM #1" in line]
    return row


def test_a_report_is_answered_with_curve_and_verdict():
    row = answer(told(claims=[CLAIM]))
    assert "256: 9" in row
    assert "**grows**, curved" in row


def test_a_report_can_be_answered_beside_another_config():
    flat = made("noop", "0.32.0", noise=0)
    row = answer(text_of(GROWING, flat, claims=[BESIDE_NOOP]))
    assert "and +0.0 [-0.0, +0.0] of `noop`" in row


def of_hosts(**hosts: str) -> str:
    """The page of two cells that a report sets beside each other."""
    cells = [
        msgspec.structs.replace(made(name), host=host) for name, host in hosts.items()
    ]
    return text_of(*cells, claims=[BESIDE_NOOP])


def test_cells_of_several_hosts_are_marked_and_never_compared():
    text = of_hosts(noop="10.0.0.1", mooncake_both="10.0.0.2")
    assert "| 1 | 10.0.0.1 |" in text
    rows = [
        line for line in text.splitlines() if line.startswith("| `mooncake_both` |")
    ]
    assert ["host 2 |" in row for row in rows] == [True, False]
    assert "`noop` is of another host, and not compared" in answer(text)


def test_cells_of_one_host_of_a_cluster_are_compared_and_not_marked():
    text = of_hosts(noop="10.0.0.1", mooncake_both="10.0.0.1")
    assert "of `noop` |" in answer(text)
    assert "<br> host" not in text


def test_a_stand_in_is_said_wherever_the_connector_is_named():
    text = told(stand_ins={"mooncake_cpu_layout": "the layout of a CPU's cache"})
    rows = [line for line in text.splitlines() if line.startswith("| `mooncake_both`")]
    assert len(rows) == TABLES
    assert all("\N{DAGGER}" in row for row in rows)
    assert "(../../patches/README.md#mooncake_cpu_layout): the layout of" in text


@pytest.mark.slow
def test_sources_beside_a_build_are_a_table_with_the_largest_difference(monkeypatch):
    near, far = Estimate(1.01, (0.99, 1.02)), Estimate(0.97, (0.96, 0.98))
    rows = [
        SourcesRow("noop", "cache", 1.0, 1.0, near, Estimate(1.002)),
        SourcesRow("nixl_both", "running", 40.0, 41.0, far, Estimate(0.995)),
    ]
    found = SourcesResult("0.32.0", "0.30.0", rows)
    monkeypatch.setattr(page, "read_sources", lambda: found)
    text = told()
    assert (
        "| `nixl_both` | running | 0.970 [0.960, 0.980] | 0.995 [?] | 40 | 41 |" in text
    )
    assert "by at most 3.0%, those of the second build by at most 0.5%" in text


@pytest.mark.slow
def test_the_committed_page_is_what_the_committed_cells_make():
    cells = read_all_cells()
    matrix = with_releases_of(read_matrix(), cells)
    assert (RESULTS / PAGE).read_text() == render.markdown(summary_page(matrix, cells))
    # Each cell is on the page.
    assert set(matrix.releases) <= set(read_matrix().releases)
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


CUDA = """\
the worker did not start
--- end of /tmp/cell/log
[rank0]:   File "/tmp/cell/tree/vllm/v1/p2p/engine.py", line 136, in __init__
[rank0]:     self.send_stream = torch.cuda.Stream()
[rank0]:   File "/x/site-packages/torch/cuda/streams.py", line 41, in __new__
[rank0]: torch.AcceleratorError: CUDA error: no driver
[rank0]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
PYDANTIC = """\
  File "/tmp/cell/tree/vllm/engine/arg_utils.py", line 2838, in create_engine_config
(MainProcess pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error \
for VllmConfig
  Value error, HiSparse currently requires NVIDIA CUDA. [type=value_error, input=...]
    For further information visit https://errors.pydantic.dev
"""
ASSERTION = """\
[rank0]:   File "/x/site-packages/vllm/v1/multi_connector.py", line 193, in _configs
[rank0]:     assert ktcs is not None
[rank0]:            ^^^^^^^^^^^^^^^^
[rank0]: AssertionError
"""


# Named like no exception, after another, with two lines, before other messages.
UNUSUAL = """\
Traceback (most recent call last):
  File "/x/site-packages/vllm/v1/factory.py", line 7, in create
    int("a")
ValueError: invalid literal

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/mypkg/kv.py", line 3, in __init__
    raise NoDevice("needs RDMA\\n  and a port")
mypkg.errors.NoDevice: needs RDMA
  and a port
Exception ignored in: <function Mine.__del__ at 0x7f>
Traceback (most recent call last):
  File "/x/mypkg/kv.py", line 9, in __del__
    self.port.close()
AttributeError: 'Mine' object has no attribute 'port'
[W1127 01:02 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called
"""
CRASH = """\
the worker ended with status -11
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/x/mypkg/kv.py", line 3 in __init__

Extension modules: numpy._core (total: 1)
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CUDA, "AcceleratorError: CUDA error: no driver (vllm/v1/p2p/engine.py:136)"),
        (
            PYDANTIC,
            "Value error, HiSparse currently requires NVIDIA CUDA. "
            "(vllm/engine/arg_utils.py:2838)",
        ),
        (
            ASSERTION,
            "AssertionError: assert ktcs is not None (vllm/v1/multi_connector.py:193)",
        ),
        ("ValueError: a message\n", "ValueError: a message"),
        (UNUSUAL, "NoDevice: needs RDMA (vllm/v1/factory.py:7)"),
        (CRASH, "Fatal Python error: Segmentation fault"),
        (
            "the worker ended with status 137\nINFO all is well\n",
            "the worker ended with status 137: INFO all is well",
        ),
        ("the worker did not start in 180 s\nINFO loading\n", "INFO loading"),
    ],
)
def test_the_reason_is_the_last_exception_and_its_place_in_vllm(error, told):
    assert reason(error) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("plain", None),
        ("noop", None),
        ("mooncake_both", None),
        ("observatory/example", None),
        ("observatory/hf3fs", "there is no HF3FSKVConnector in this release"),
    ],
)
def test_a_connector_that_came_later_is_said_to_be_missing(config, told):
    """In the release of this checkout, 0.18.1."""
    assert not_in_release(load_connector(config), installation()) == told


@pytest.mark.slow
def test_a_module_of_vllm_that_came_later_is_said_to_be_missing():
    module = "vllm.distributed.kv_transfer.kv_connector.v1.umbp.connector"
    transfer = {"kv_connector": "UMBP", "kv_connector_module_path": module}
    own = msgspec.structs.replace(load_connector("noop"), kv_transfer_config=transfer)
    assert not_in_release(own, installation()) == "there is no UMBP in this release"


@pytest.mark.slow
def test_the_engine_of_a_cell_gets_its_config_in_no_command_line(monkeypatch, tmp_path):
    given: list = []

    def engine(*arguments: str, **options: Any) -> None:
        given.append((arguments, options))
        raise ServerError("started nothing")

    monkeypatch.setattr(cell, "EngineProcess", engine)
    _, connector = own_connector("mypkg.kv:Mine", '{"password": "sesame"}')
    with pytest.raises(ServerError):
        cell.run([(connector, installation())], tmp_path)
    ((arguments, options),) = given
    assert "sesame" not in str(arguments)
    assert "sesame" in options["env"][cell.GIVEN]
    assert options["secrets"] == ["sesame"]


def test_what_a_report_sets_beside_each_other_is_one_piece_of_work():
    matrix = read_matrix()
    cells = [
        (release, connector)
        for release in matrix.releases
        for connector in matrix.connectors
    ]
    together = compared(cells, matrix.claims)
    assert sorted(cell for some in together for cell in some) == sorted(cells)
    pairs = {
        ((one.release, one.beside), (one.release, one.connector))
        for one in matrix.claims
        if one.beside
    }
    assert pairs
    assert {tuple(some) for some in together if len(some) > 1} == pairs


def test_a_cell_whose_other_is_there_already_is_measured_alone():
    claims = read_matrix().claims
    (one,) = [claim for claim in claims if claim.beside]
    cells = [(one.release, one.connector)]
    assert compared(cells, claims) == [cells]
