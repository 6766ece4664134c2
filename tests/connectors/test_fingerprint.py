# SPDX-License-Identifier: Apache-2.0
"""Two fingerprints that differ are told apart by name."""

from __future__ import annotations

from connectors.direct_read.fingerprint import difference


def test_what_differs_is_named_with_both_values():
    ours = {"model": "m", "block_size": "16", "ours": "1"}
    assert difference(ours, dict(ours)) is None
    theirs = {"model": "m", "block_size": "32", "theirs": "2"}
    assert difference(ours, theirs) == (
        "block_size is 16 here and 32 there; ours is 1 here and not given there; "
        "theirs is not given here and 2 there"
    )


def test_a_different_seed_is_told_with_what_to_set():
    assert "PYTHONHASHSEED" in difference({"NONE_HASH": "1"}, {"NONE_HASH": "2"})
