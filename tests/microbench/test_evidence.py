# SPDX-License-Identifier: Apache-2.0
"""The results of a run can be made again from a row for each of its holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.occasions import holds, occasion, report
from kvtax.cli import main
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.evidence import Evidence
from kvtax.records.files import read_document
from tests.microbench.synthetic import Truth, write_run

RESULTS = ("per_config.json", "SUMMARY.md")


def made_again(evidence: Path, out: Path) -> list[bytes]:
    """What `kvtax sweep --report` makes of a file of evidence."""
    assert main(["sweep", "--report", str(evidence), "--out", str(out)]) == 0
    return [(out / name).read_bytes() for name in RESULTS]


def test_results_of_a_run_are_made_again_from_its_evidence_byte_for_byte(tmp_path):
    truths = [Truth("plain"), Truth("mooncake_both_hash_sync", 60.0, build_meta=2.0)]
    truths += [Truth("noop", fails="it died"), Truth("plain_aa")]
    folder = write_run(tmp_path / "run", truths)
    assert main(["sweep", "--report", str(folder)]) == 0
    first = [(folder / name).read_bytes() for name in RESULTS]
    assert made_again(folder / "evidence.json.gz", tmp_path / "again") == first


@pytest.mark.skipif(
    not (REPOSITORY / "evidence.json.gz").exists(), reason="no sweep is committed"
)
def test_the_committed_sweep_is_made_again_from_its_evidence(tmp_path):
    committed = [(REPOSITORY / name).read_bytes() for name in RESULTS]
    assert made_again(REPOSITORY / "evidence.json.gz", tmp_path) == committed


@pytest.mark.parametrize(
    ("value", "ci95", "held"),
    [(5.0, (4.0, 6.0), True), (3.9, (4.0, 6.0), False), (5.0, None, True)],
)
def test_a_headline_holds_another_days_figure_or_not(value, ci95, held):
    assert holds(Estimate(5.0, (4.0, 6.0)), Estimate(value, ci95)) is held
    assert holds(Estimate(5.0, None), Estimate(value, ci95)) is None


def test_sweeps_of_two_occasions_are_compared_by_the_walk(tmp_path):
    walk = Truth("mooncake_both_hash_sync", 60.0, build_meta=2.0)
    sweeps = []
    for number in range(2):
        folder = write_run(tmp_path / str(number), [Truth("plain"), walk])
        assert main(["sweep", "--report", str(folder)]) == 0
        evidence = read_document(folder / "evidence.json.gz", Evidence)
        sweeps.append(occasion(evidence))
    first, _ = sweeps
    assert first.adds["µs"].value == pytest.approx(60 * 16, rel=0.05)
    # The made-up servers timed no yardstick.
    assert first.adds["yardsticks"] is None
    said = report(sweeps)
    assert "in µs in 2 of 2, in yardsticks in 0 of 0" in said
