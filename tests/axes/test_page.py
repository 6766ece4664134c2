# SPDX-License-Identifier: Apache-2.0
"""The page says of each cell a figure or a reason, and is what the records make."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from kvtax.axes import cell, page
from kvtax.axes.cell import not_in_release, reason
from kvtax.axes.matrix import (
    RESULTS,
    Matrix,
    SourcesResult,
    SourcesRow,
    read_all_cells,
    read_matrix,
)
from kvtax.axes.page import (
    ARROW,
    CSV,
    PAGE,
    idle_csv,
    summary_page,
    with_releases_of,
)
from kvtax.engine import ServerError
from kvtax.engine.connector import load_connector, own_connector
from kvtax.engine.installation import installation
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.observatory_cell import CellRecord, Idle, keep_cell
from kvtax.report import render
from kvtax.report.markdown import TIMES
from kvtax.verdict.axes import AXES
from tests.harness.made_up import made
from tests.look.made_up_server import served
from tests.verdict.test_axes import curve

MATRIX = Matrix(
    releases=["0.28.0", "0.32.0"], connectors=["noop", "mooncake_both"], noop="noop"
)
GROWING = made("mooncake_both", running=curve("running", 2, 900.0))
DEAD = msgspec.structs.replace(
    made("noop", "0.28.0"), error="no | device (vllm/v1/a.py:3)"
)


def text_of(*cells: CellRecord, **changes) -> str:
    """Render the page of `cells`; `changes` go into the matrix."""
    matrix = msgspec.structs.replace(MATRIX, **changes)
    by_name = {(cell.release, cell.connector): cell for cell in cells}
    return render.markdown(summary_page(matrix, by_name))


def page_of_both(**changes) -> str:
    return text_of(GROWING, DEAD, **changes)


def test_a_cell_has_its_axis_and_shape_or_a_reason():
    text = page_of_both()
    assert f"**10 {ARROW}" in text.replace("9 ", "10 ")
    dead = msgspec.structs.replace(DEAD, release="0.32.0")
    assert "| `noop` | no \\| device (vllm/v1/a.py:3) |" in text_of(GROWING, dead)


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


def beside_a_no_op() -> CellRecord:
    """Make a cell whose steps take 1.5 times its no-op's."""

    def steps(us: float) -> dict[str, dict[str, list[list[float]]]]:
        # Each pass is on a machine twice as slow as the one before.
        return {
            name: {"step_us": [[us * 2**k] * len(axis.levels) for k in range(6)]}
            for name, axis in AXES.items()
        }

    own = steps(300.0)
    cell = made("mooncake_both")
    means = {axis: times | own[axis] for axis, times in cell.means_us.items()}
    return msgspec.structs.replace(cell, means_us=means, noop_us=steps(200.0))


def test_a_cell_beside_a_no_op_leads_with_the_ratio_of_their_steps():
    text = text_of(beside_a_no_op())
    ends = f"{TIMES}1.50 {ARROW} 1.50 <br> 10 {ARROW} 10"
    assert text.count(ends) == len(AXES)


def test_an_axis_that_no_cell_has_has_no_column():
    means = {name: us for name, us in GROWING.means_us.items() if name != "prompt"}
    older = msgspec.structs.replace(GROWING, means_us=means)
    assert "| prompt |" not in text_of(older)
    assert "| prompt |" in text_of(GROWING)


def test_the_csv_has_a_line_per_measured_cell_of_every_release():
    older = msgspec.structs.replace(made("noop", "0.28.0"), host="10.0.0.1")
    newer = beside_a_no_op()
    cells = {(cell.release, cell.connector): cell for cell in (older, newer)}
    head, *lines = idle_csv(cells).splitlines()
    rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    assert [row["release"] for row in rows] == ["0.28.0", "0.32.0"]
    assert [row["host"] for row in rows] == ["10.0.0.1", ""]
    assert [row["step_ratio"] for row in rows] == ["", "1.500"]
    assert idle_csv({("0.28.0", "noop"): DEAD}) == f"{head}\n"


def test_a_stand_in_is_said_wherever_the_connector_is_named():
    text = page_of_both(
        stand_ins={"mooncake_cpu_layout": "the layout of a CPU's cache"}
    )
    rows = [line for line in text.splitlines() if line.startswith("| `mooncake_both`")]
    assert rows and all("\N{DAGGER}" in row for row in rows)
    assert "(../../patches/README.md#mooncake_cpu_layout): the layout of" in text


def test_sources_beside_a_build_are_a_sentence_with_the_largest_difference(monkeypatch):
    near, far = Estimate(1.01, (0.99, 1.02)), Estimate(0.97, (0.96, 0.98))
    rows = [
        SourcesRow("noop", "cache", 1.0, 1.0, near, Estimate(1.002)),
        SourcesRow("nixl_both", "running", 40.0, 41.0, far, Estimate(0.995)),
    ]
    result = SourcesResult("0.32.0", "0.30.0", rows)
    monkeypatch.setattr(page, "read_sources", lambda: result)
    text = page_of_both()
    assert "by at most 3.0%, those of a second build by at most 0.5%" in text


@pytest.mark.slow
def test_the_committed_page_is_what_the_committed_cells_make():
    cells = read_all_cells()
    matrix = with_releases_of(read_matrix(), cells)
    assert (RESULTS / PAGE).read_text() == render.markdown(summary_page(matrix, cells))
    assert (RESULTS / CSV).read_text() == idle_csv(cells)
    assert set(matrix.releases) <= set(read_matrix().releases)


@pytest.mark.slow
def test_each_connector_and_tier_of_the_newest_release_has_a_cell_or_a_reason():
    matrix, cells = read_matrix(), read_all_cells()
    newest = matrix.releases[-1]
    vllm = REPOSITORY / "third_party" / f"vllm-{newest}" / "vllm"
    if not vllm.exists():
        pytest.skip("make vllm-releases fetches the release")
    transfers = [
        load_connector(connector).kv_transfer_config or {}
        for release, connector in cells
        if release == newest and connector in matrix.connectors
    ]
    having = {transfer.get("kv_connector") for transfer in transfers} | {
        *matrix.reasons
    }
    for transfer in transfers:
        for tier in transfer.get("kv_connector_extra_config", {}).get(
            "secondary_tiers", []
        ):
            having.add(f"Offloading tier `{tier['type']}`")
    factory = vllm / "distributed/kv_transfer/kv_connector/factory.py"
    pattern = r'register_connector\(\s*"(\w+)"'
    connectors = re.findall(pattern, factory.read_text())
    tiers = (vllm / "v1/kv_offload/tiering/factory.py").read_text()
    for tier in re.findall(r'register_tier\(\s*"(\w+)"', tiers):
        connectors.append(f"Offloading tier `{tier}`")
    assert len(connectors) > 15
    assert set(connectors) - having == set()


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
# A stand-in lacks what the connector wants; our recorder called the connector.
THIRD_PARTY = """\
[rank0]:   File "/x/site-packages/vllm/v1/worker/gpu_model_runner.py", line 7119, in f
[rank0]:   File "/tmp/cell/vllm/kvtax_probe/connector.py", line 264, in timed
[rank0]:     result = getattr(owner, name)(self_, args[0])
[rank0]:   File "/x/kvbm/vllm_integration/connector_worker.py", line 123, in <listcomp>
[rank0]:     raw_event_handles = [event.cuda_event for event in events]
[rank0]:   File "/usr/lib/python3.11/functools.py", line 9, in wrapper
[rank0]: AttributeError: 'Event' object has no attribute 'cuda_event'
"""
CRASH = """\
the worker ended with status -11
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/x/mypkg/kv.py", line 3 in __init__

Extension modules: numpy._core (total: 1)
"""


@pytest.mark.parametrize(
    ("error", "message"),
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
        (UNUSUAL, "NoDevice: needs RDMA (x/mypkg/kv.py:3)"),
        (
            THIRD_PARTY,
            "AttributeError: 'Event' object has no attribute 'cuda_event' "
            "(kvbm/vllm_integration/connector_worker.py:123)",
        ),
        (CRASH, "Fatal Python error: Segmentation fault"),
        (
            "the worker ended with status 137\nINFO all is well\n",
            "the worker ended with status 137: INFO all is well",
        ),
        ("the worker did not start in 180 s\nINFO loading\n", "INFO loading"),
    ],
)
def test_the_reason_is_the_last_exception_and_where_it_arose(error, message):
    assert reason(error) == message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("plain", None),
        ("noop", None),
        ("mooncake_both", None),
        ("observatory/decode_bench", None),
        ("observatory/hf3fs", "there is no HF3FSKVConnector in this release"),
    ],
)
def test_a_connector_that_came_later_is_said_to_be_missing(config, error):
    """In the release of this checkout, 0.18.1."""
    assert not_in_release(load_connector(config), installation()) == error


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


def test_a_method_that_returns_a_constant_takes_no_time_and_can_be_limited(tmp_path):
    server = served(tmp_path / "records", 20)
    server.header["constant"] = ["wait_for_save"]
    steps = cell._read(server.write())
    assert steps["worker.wait_for_save_us"].to_list() == [0.0] * 20
    assert steps["worker.get_finished_us"].min() > 0
