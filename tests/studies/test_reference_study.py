# SPDX-License-Identifier: Apache-2.0
"""The page beside the study says of each figure whether it agrees."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.records import RecordsError
from studies.harness import rows_table
from studies.reference_study.__main__ import (
    AGREES_WITHIN,
    COLUMNS,
    SUBSTRATE,
    Row,
    _analysis,
    _connectors,
    _framework,
    agrees,
)

figures = st.floats(0.01, 1e6)


@given(figures, figures)
def test_which_of_two_figures_is_the_studys_makes_no_difference(one, other):
    assert agrees(one, other) == agrees(other, one) == agrees(-one, -other)
    assert not agrees(one, -other)


@given(figures, st.floats(1.001, 10))
def test_figures_agree_up_to_the_stated_factor(study, factor):
    other = study * factor
    assert agrees(study, other) == (other / study <= AGREES_WITHIN)


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (Row("a", 2, 2.2), "| a | 2 | 2.2 | agrees |  |"),
        (Row("a", 2, 3, "why"), "| a | 2 | 3 | differs | why |"),
        (Row("a", 2, None, "why"), "| a | 2 | - |  | why |"),
        (Row("a", None, 3), "| a | - | 3 |  |  |"),
        (Row("moves", 0, 0), "| moves | 0 | 0 | agrees |  |"),
        (Row("a", -0.8, 0.2), "| a | -0.8 | 0.2 | differs |  |"),
        (Row("a", -0.8, 0.2, near=1), "| a | -0.8 | 0.2 | agrees |  |"),
        (Row("a", 0, 1.1, near=1), "| a | 0 | 1.1 | differs |  |"),
    ],
)
def test_a_row_without_one_of_the_two_has_no_verdict(row, cells):
    assert rows_table([row], COLUMNS).splitlines()[-1] == cells


def test_the_frameworks_part_is_split_by_purpose_and_has_no_thread_of_the_engine():
    rows = {row.what.partition(",")[0]: row for row in _framework()}
    assert {"metadata", "KV buffers", "what has arrived"} < rows.keys()
    assert all(row.here >= 0 for row in rows.values() if row.here is not None)
    assert "MainThread" not in rows["its own threads"].note
    assert "nixl" in rows["its own threads"].note


def test_each_connector_has_one_row_and_its_break_even(tmp_path):
    def arm(ms):
        level = {"p90": {"value": ms}}
        return {
            "latency": {
                "all": {"all": dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), level)}
            },
            "repeats": [
                {"hotspot": {"mean": ms / 1000}, "apc": {"overall": {"apc": ms / 2000}}}
            ],
            "interference": None,
        }

    slower = {"value": 2.0, "ci95": [1.0, 3.0]}
    document = {
        "arms": {f"{name}@15": arm(1100) for name in SUBSTRATE}
        | {"plain@15": arm(1000)},
        "comparisons": [
            {"arm": f"{name}@15", "paired": {"e2e_ms": {"percent": slower}}}
            for name in SUBSTRATE
            if name != "plain"
        ],
    }
    (tmp_path / "analysis.json").write_text(json.dumps(document))
    rows, table = _connectors(tmp_path)
    assert [line.split("|")[1].strip(" `") for line in table.splitlines()[2:]] == [
        *SUBSTRATE
    ]
    walk = next(line for line in table.splitlines() if "hash_walk" in line)
    # Each of 0.5 % must make up for 2 % of all: four requests' time.
    assert "| +2.0 [+1.0, +3.0] | 4 |" in walk
    assert "| 10 (45.3) | 10 (24.5) | 10 (27) | 10 (19) | 5 (-1.1) |" in walk
    assert len(rows) == 6 * len(SUBSTRATE)


def test_a_run_of_another_experiment_is_refused_by_name(tmp_path):
    (tmp_path / "analysis.json").write_text('{"arms": {"linear@4": {}}}')
    with pytest.raises(RecordsError, match="a run of fleet/configs"):
        _analysis(tmp_path, "study_sample", ["linear@1"])
