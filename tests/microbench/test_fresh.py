# SPDX-License-Identifier: Apache-2.0
"""A trial counts only if its server began with nothing in its cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.records.line_file import LineFile
from lab.records.steps import EngineHeader, EngineStep
from microbench.profile import load_profile
from microbench.trial import TrialError, _check_fresh

PROFILE = load_profile("cpu-smoke")
OWN_BLOCKS = 3


def write_first_step(folder: Path, **changes: int | None) -> None:
    fields = {
        "step_id": 0,
        "prefill_tokens": OWN_BLOCKS * PROFILE.block_size + 1,
        "cache_size": OWN_BLOCKS,
    }
    with LineFile(folder / "engine_step.jsonl", EngineHeader(pid=1)) as file:
        file.append(EngineStep(t_ns=1, **fields | changes))


def test_a_server_that_caches_its_own_first_prompt_is_fresh(tmp_path: Path) -> None:
    write_first_step(tmp_path)
    _check_fresh(tmp_path, PROFILE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cache_size": OWN_BLOCKS + 1}, "found 1 cached blocks that it did not bring"),
        ({"step_id": 1}, "was not fresh: its first step .id 1."),
        ({"cache_size": None}, "step_timing_v2"),
    ],
)
def test_any_other_server_is_refused(
    tmp_path: Path, changes: dict[str, int | None], why: str
) -> None:
    write_first_step(tmp_path, **changes)
    with pytest.raises(TrialError, match=why):
        _check_fresh(tmp_path, PROFILE)


def test_an_engine_without_a_step_is_refused(tmp_path: Path) -> None:
    LineFile(tmp_path / "engine_step.jsonl", EngineHeader(pid=1)).__exit__()
    with pytest.raises(TrialError, match="did not record"):
        _check_fresh(tmp_path, PROFILE)
