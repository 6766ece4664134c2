# SPDX-License-Identifier: Apache-2.0
"""The table says what refuses to start, and where, not what a log ends with."""

from __future__ import annotations

import pytest

from lab.serving.connector import load_connector
from lab.serving.installation import installation
from observatory.reasons import not_in_release, reason

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
        ("ValueError: a message\n", "ValueError: a message"),
        ("the worker ended with status 137\nINFO all is well\n", "INFO all is well"),
    ],
)
def test_the_reason_is_the_last_exception_and_its_place_in_vllm(error, told):
    assert reason(error) == told


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
