# SPDX-License-Identifier: Apache-2.0
"""The reference study's own table (its hypothesis H5), with this run's figures beside.

The study: a cost per step against |cache| on an H20, vLLM 0.18.1, May 2026,
unpublished. What its `step_dur` names is the time in `schedule()`.
"""

from __future__ import annotations

import numpy as np

from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.records.run import ReferenceFigures
from kvtax.report.document import Table
from kvtax.report.markdown import DASH, interval, number, spread
from kvtax.verdict.roles import Roles

# The study's replay: APC 79 %, so about so many blocks, on a forward of so long.
REPLAY_BLOCKS, FORWARD_MS = 13_000, 7.0


def table_of(document: PerConfig, roles: Roles) -> Table:
    """Tabulate each config, and the study's figures for the same thing below it."""
    rows = []
    for name, entry in document.configs.items():
        rows.append([name, *_ours(entry), entry.verdict])
        if (told := roles.of[name].reference) is not None:
            rows.append(["its reference (H20)", *_theirs(told), DASH])
    at = document.window.at_cache_blocks if document.window else 0
    note = (
        "Rows of this run, and below some of them the reference study's (H5; H20 96 "
        f"GB, levels at 16,600 blocks; here {at:,}). Another machine and another load: "
        "compare ratios and signs, not µs. The study's `step_dur` is our `schedule`. "
        "Its `mooncake_both` is our `mooncake_both_hash_sync`, a fork that walks all "
        "cached hashes in each step; Mooncake in vLLM 0.18.1 does not. get_finished "
        "is that of a decode-only step without transfers."
    )
    head = ["config", "slope, µs per 1,000 blocks", "schedule µs p50"]
    head += ["build_meta µs p50 (share)", "get_finished µs p50/p90/p99", "n", "verdict"]
    return Table(title="H5: cost per step", note=note, columns=head, rows=rows)


def _ours(entry: ConfigEntry) -> list[str]:
    if entry.verdict == "failed":
        return [DASH] * 5
    level = entry.schedule_us or {}
    return [
        interval(entry.slope_us_per_1k_blocks["schedule"]),
        number(level.get("p50")),
        _share((entry.build_meta_us or {}).get("p50"), level.get("p50")),
        spread(entry.get_finished_us),
        f"{entry.n_window_steps:,}",
    ]


def _theirs(told: ReferenceFigures) -> list[str]:
    finished = told.get_finished_us
    return [
        f"{told.schedule_slope_us_per_1k_blocks:+.1f}",
        number(told.schedule_p50_us, 0),
        _share(told.build_meta_p50_us, told.schedule_p50_us),
        "/".join(number(us, 0) for us in finished) if finished else DASH,
        "15,000 to 18,000",
    ]


def _share(part: float | None, whole: float | None) -> str:
    if part is None or not whole:
        return DASH
    return f"{number(part)} ({part / whole:.0%})"


def reconciliation(document: PerConfig, roles: Roles) -> str:
    """State what the walk adds to a step of the study's replay, by both machines."""
    told = []
    for name in roles.named("hypothesis"):
        entry, theirs = document.configs[name], roles.of[name].reference
        held = entry.held.get("schedule")
        finished = (entry.get_finished_us or {}).get("p50")
        if theirs and theirs.get_finished_us and held and finished is not None:
            empty, at = held.us[0], np.interp(REPLAY_BLOCKS, held.cache_blocks, held.us)
            ours_ms = (float(at) - empty + finished) / 1e3
            slope = theirs.schedule_slope_us_per_1k_blocks
            build_us = slope * REPLAY_BLOCKS / 1e3
            ref_ms = (build_us + theirs.get_finished_us[0]) / 1e3
            told.append(
                f"At the study's APC of 79 % (about {REPLAY_BLOCKS:,} blocks) the walk "
                f"and get_finished of {name} add {ours_ms:.2f} ms per step here, and "
                f"by the study's figures {ref_ms:.2f} ms: {ours_ms / FORWARD_MS:.0%} "
                f"and {ref_ms / FORWARD_MS:.0%} of a decode forward of {FORWARD_MS:g} "
                "ms."
            )
    return " ".join(told)
