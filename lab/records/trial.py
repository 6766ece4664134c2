# SPDX-License-Identifier: Apache-2.0
"""trial.json: how one trial went, one server lifetime of one config."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ReadCounts(msgspec.Struct):
    """What a peer read in one trial."""

    reads: int
    """Turns in which the peer found something."""
    blocks_offered: int
    """Blocks that the server offered."""
    blocks_valid: int
    """Offered blocks that were still valid when they had arrived."""
    seconds: float
    """From the first turn to the last."""


class TrialRecord(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.trial/1"
):
    """How one trial went; written when it has ended."""

    config: str
    """Name of the connector config."""
    repeat: int
    """Counts from 0."""
    status: Literal["ok", "failed"]
    """Whether the trial is a valid measurement."""
    error: str | None = None
    """Why it failed."""
    connector_config: dict[str, Any] | None = None
    """vLLM's `kv_transfer_config`; null without a connector."""
    patches: dict[str, str] = {}
    """SHA-256 by name of the patches in this trial's vLLM tree."""
    num_blocks: int
    """KV cache blocks."""
    block_size: int
    """Tokens per block."""
    started_utc: str | None = None
    """When the trial started; null if it never did."""
    ready_s: float | None = None
    """Until the server answered."""
    wall_s: float | None = None
    """From the start of the trial to its end."""
    peak_rss_mib: float | None = None
    """Peak resident memory of the server."""
    reads: ReadCounts | None = None
    """What a peer read meanwhile; null without one."""
