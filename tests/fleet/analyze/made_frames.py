# SPDX-License-Identifier: Apache-2.0
"""Frames of requests with known values, for metrics that need no files."""

from __future__ import annotations

import polars as pl

from fleet.analyze.frames import requests_frame

AB = ["a", "b"]


def requests(rows: list[dict]) -> pl.DataFrame:
    """A requests_frame of `rows`: what they leave out is a plain ok request."""
    empty = requests_frame([])
    plain = {
        "status": "ok",
        "turn": 0,
        "session": "s",
        "arm": "x",
        "repeat": 0,
        "usage_prompt_tokens": 100,
        "usage_completion_tokens": 0,
        "output_tokens": 0,
    }
    full = [
        dict.fromkeys(empty.columns)
        | {"id": f"r{i}", "first_token_ns": row.get("sent_ns")}
        | plain
        | row
        for i, row in enumerate(rows)
    ]
    return pl.DataFrame(full, schema=empty.schema)
