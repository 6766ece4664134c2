# SPDX-License-Identifier: Apache-2.0
"""Real time and virtual time, side by side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet.analyze.beside import beside, main
from lab.paths import REPOSITORY

REAL = REPOSITORY / "docs" / "results" / "fleet-policies"


def document(cached: float, ttft_ms: float) -> dict:
    levels = {"p50": {"value": ttft_ms}, "p90": None}
    latency = dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), levels)
    repeat = {"apc": {"overall": {"apc_usage": cached}}}
    arm = {"latency": {"all": {"all": latency}}, "repeats": [repeat, repeat]}
    return {"arms": {"linear@2": arm}}


def test_an_arm_s_row_has_real_levels_and_virtual_differences() -> None:
    last = beside(document(0.5, 200.0), document(0.512, 190.0)).splitlines()[-1]
    assert last.startswith("| `linear@2` | 50.0 | +1.2 | 200.0 -5.0 % | \N{EN DASH} |")


def test_a_committed_run_beside_itself_differs_in_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["beside", str(REAL), str(REAL)])
    assert main() == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 10
    assert all(row.count(" +0.0 ") == 7 for row in rows)


@pytest.mark.parametrize("content", [None, b"{"])
def test_what_cannot_be_read_is_named(
    content: bytes | None, tmp_path: Path, monkeypatch, capsys
) -> None:
    if content is not None:
        (tmp_path / "analysis.json").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["beside", str(REAL), str(tmp_path)])
    assert main() == 2
    assert "fleet.analyze.beside:" in capsys.readouterr().err
