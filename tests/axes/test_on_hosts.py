# SPDX-License-Identifier: Apache-2.0
"""Cells that are compared are measured by one host, whichever it is."""

from __future__ import annotations

from kvtax.axes.matrix import read_matrix
from kvtax.axes.on_hosts import compared


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
