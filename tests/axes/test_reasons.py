# SPDX-License-Identifier: Apache-2.0
"""Cells: what refuses to start, and where; which of them one host measures together."""

from __future__ import annotations

from typing import Any

import pytest

from kvtax.axes import cell
from kvtax.axes.cell import not_in_release, reason
from kvtax.axes.matrix import compared, read_matrix
from kvtax.engine import ServerError
from kvtax.engine.connector import load_connector, own_connector
from kvtax.engine.installation import installation

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
        (
            CUDA,
            "AcceleratorError: CUDA error: no driver (vllm/v1/p2p/engine.py:136)",
        ),
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
        ("observatory/umbp", "there is no UMBPStoreConnector in this release"),
    ],
)
def test_a_connector_that_came_later_is_said_to_be_missing(config, told):
    """In the release of this checkout, 0.18.1."""
    assert not_in_release(load_connector(config), installation()) == told


PLUGIN = """
def register():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    KVConnectorFactory.register_connector("Odd", "connectors.noop", "NoopConnector")
"""


@pytest.mark.slow
def test_a_connector_that_a_plugin_registers_is_there(tmp_path, monkeypatch):
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nodd = odd:register\n"
    )
    (tmp_path / "odd.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, connector = own_connector("Odd", None)
    assert not_in_release(connector, installation()) is None


def test_the_engine_of_a_cell_gets_its_config_in_no_command_line(monkeypatch, tmp_path):
    given: list = []

    def engine(*arguments: str, **options: Any) -> None:
        given.append((arguments, options))
        raise ServerError("started nothing")

    monkeypatch.setattr(cell, "EngineProcess", engine)
    _, connector = own_connector("mypkg.kv:Mine", '{"password": "sesame"}')
    with pytest.raises(ServerError):
        cell.run(connector, installation(), tmp_path / "cell")
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
