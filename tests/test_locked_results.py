# SPDX-License-Identifier: Apache-2.0
"""Results that git does not keep come back to the byte."""

from __future__ import annotations

import json

import pytest

from tools.locked_results import ResultsError, fingerprint, make, read_lock

SMALLEST = "virtual-open_loop"


@pytest.mark.slow
def test_the_smallest_locked_result_is_made_again_with_equal_numbers(tmp_path):
    make(SMALLEST, read_lock()[SMALLEST], tmp_path / SMALLEST)


def test_a_changed_number_changes_the_fingerprint_and_provenance_does_not(tmp_path):
    def analysis(value: float, commit: str):
        path = tmp_path / f"{value}-{commit}.json"
        path.write_text(json.dumps({"made": commit, "arms": {"linear": value}}))
        return fingerprint(path)

    assert analysis(1.0, "a") == analysis(1.0, "b") != analysis(1.5, "a")


def test_a_tree_with_changes_gives_the_same_fingerprint(tmp_path):
    def analysis(*kinds: str) -> str:
        path = tmp_path / "analysis.json"
        warnings = [{"kind": kind} for kind in kinds]
        path.write_text(json.dumps({"arms": {}, "warnings": warnings}))
        return fingerprint(path)

    assert analysis("drain") == analysis("uncommitted", "drain") != analysis()


def test_a_result_that_differs_is_refused(tmp_path, monkeypatch):
    locked = read_lock()[SMALLEST]
    monkeypatch.setattr(
        "tools.locked_results.subprocess.run", _writes(tmp_path / "out")
    )
    with pytest.raises(ResultsError, match=SMALLEST):
        make(SMALLEST, locked, tmp_path / "out")


def _writes(folder):
    class Ended:
        returncode = 0

    def run(command, **_):
        folder.mkdir()
        (folder / "analysis.json").write_text('{"made": {}, "arms": {}}')
        return Ended()

    return run
