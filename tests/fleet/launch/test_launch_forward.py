# SPDX-License-Identifier: Apache-2.0
"""The null model's forward takes as long as its profile says."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
import torch

from lab.paths import REPOSITORY
from lab.serving.settings import Forward


@pytest.fixture
def simulated_forward(monkeypatch):
    plugin = REPOSITORY / "lab" / "serving" / "vllm_plugin" / "kvtax_null_model"
    # The file alone: the package beside it imports vLLM when it is registered.
    monkeypatch.syspath_prepend(str(plugin))
    import forward

    yield forward
    del sys.modules["forward"]


COSTS = [
    Forward(1000),
    Forward(500, 10),
    Forward(500, 10, 0.5),
]


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_a_forward_takes_what_its_tokens_and_their_context_cost(
    cost, simulated_forward, monkeypatch, tmp_path
):
    totals = tmp_path / "totals"
    monkeypatch.setenv("KVTAX_FORWARD_TOTALS", str(totals))
    forward = simulated_forward.SimulatedForward(**msgspec.structs.asdict(cost))
    # A prefill of 20 tokens from position 100 on, and a decode at 7.
    positions = torch.tensor([*range(100, 120), 7])
    for _ in range(3):
        forward.wait(positions)
    context = sum(range(100, 120)) + 7
    expected_us = (
        cost.forward_us + cost.us_per_token * 21 + cost.us_per_context_token * context
    )
    forwards, simulated_ns, slept_ns = np.fromfile(totals, np.int64)
    assert forwards == 3
    assert simulated_ns == pytest.approx(3000 * expected_us, rel=1e-6)
    assert slept_ns >= simulated_ns
