# SPDX-License-Identifier: Apache-2.0
"""A run in real time is set beside its virtual twin, request by request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from studies.real_time.__main__ import compared, text


def run(repeat: int, times_ms: dict[str, tuple[float, float]], **more: Any) -> Any:
    """A run of one arm: by request, its first token and its end after sending."""
    requests = [
        SimpleNamespace(
            id=name,
            status="ok",
            sent_ns=5_000_000,
            first_token_ns=5_000_000 + first_ms * 1e6,
            end_ns=5_000_000 + end_ms * 1e6,
        )
        for name, (first_ms, end_ms) in times_ms.items()
    ]
    machine = SimpleNamespace(**({"saturated": None} | more))
    info = SimpleNamespace(arm="plain@2", repeat=repeat, machine=machine)
    return SimpleNamespace(info=info, requests=requests)


def test_a_ratio_is_of_the_mean_over_the_repeats_and_of_the_first_virtual_one():
    real = [run(0, {"a": (10, 40), "b": (30, 60)}), run(1, {"a": (30, 40)})]
    real.append(run(2, {"a": (9_999, 9_999)}, saturated="all cores were busy"))
    virtual = [run(0, {"a": (10, 20), "b": (20, 60)}), run(1, {"a": (999, 999)})]
    arms = compared(real, virtual)
    ttft = arms["plain@2"]["ttft_ms"]
    assert ttft["ratio_by_request"] == pytest.approx({"a": 2.0, "b": 1.5})
    assert (ttft["real_mean"], ttft["virtual_mean"]) == (25, 15)
    assert "1.75 [1.50, 2.00]" in text(arms)
