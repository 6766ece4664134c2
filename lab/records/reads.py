# SPDX-License-Identifier: Apache-2.0
"""reads.jsonl: what a peer read from the server of a trial, turn by turn."""

from __future__ import annotations

import msgspec


class ReadsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.reads/1"
):
    """Header; written by the peer before its first turn."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of `t_ns`."""
    reads_per_s: float | None = None
    """Turns per second, at most."""


class ReadRecord(msgspec.Struct, kw_only=True):
    """One turn of the peer; 0 in all but `t_ns` and `lookup_us` if it found nothing."""

    t_ns: int
    """When the turn began."""
    offered: int
    """Blocks that the server offered."""
    valid: int
    """Blocks that were still valid when they had arrived."""
    lookup_us: float = 0.0
    """Time to ask for the prefix."""
    read_us: float = 0.0
    """Time to read the blocks."""
    validate_us: float = 0.0
    """Time to ask which blocks are still valid."""
