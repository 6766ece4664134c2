# SPDX-License-Identifier: Apache-2.0
"""The page beside the study says of each figure whether it agrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.beside_study import AGREES_WITHIN, Row, _framework, agrees, rows_table

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
    assert rows_table([row]).splitlines()[-1] == cells


def test_the_frameworks_part_is_split_by_purpose_and_has_no_thread_of_the_engine():
    rows = {row.what.partition(",")[0]: row for row in _framework()}
    assert {"metadata", "KV buffers", "what has arrived"} < rows.keys()
    assert all(row.here >= 0 for row in rows.values() if row.here is not None)
    assert "MainThread" not in rows["its own threads"].note
    assert "nixl" in rows["its own threads"].note
