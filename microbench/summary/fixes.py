# SPDX-License-Identifier: Apache-2.0
"""The part of SUMMARY.md about the fixes: what they leave of a connector's cost."""

from __future__ import annotations

from lab.stats.markdown import DASH, TIMES, Document, interval, number, spread, table
from microbench.analysis.analysis import BEFORE_AND_AFTER, NOOP

FIXED = "mooncake_both_fixed"
# The fixed connector is to cost what the one that does nothing costs, so nearly.
AIM_SHARE = 0.05
# ... and to grow by less than this where the walk grows by 50 to 90.
AIM_US_PER_1K_BLOCKS = 1.0
# What needs no hash sync, and the share of a step that it may cost.
DIRECT_READS = ("direct_read_idle", "direct_read_serving")
DIRECT_READ_AIM_SHARE = 0.02


def before_and_after(document: Document) -> str:
    """A section: noop to all fixes, and whether the aims were reached; or nothing."""
    configs = document["configs"]
    present = [
        name
        for name in BEFORE_AND_AFTER
        if name in configs and configs[name]["verdict"] != "failed"
    ]
    if NOOP not in present or not {FIXED, *DIRECT_READS} & set(present):
        return ""
    rows = [_row(name, configs[name]) for name in present]
    head = ["config", "schedule µs p50", f"{TIMES} noop", "schedule slope µs/1k"]
    head += ["build_meta µs p50", "get_finished µs p50/p90/p99"]
    head += ["overhead µs p50", f"{TIMES} noop", "step µs p50", f"{TIMES} noop"]
    head += ["TPOT ms p50"]
    parts = ["## Before and after the fixes", table(head, rows)]
    if FIXED in present:
        parts.append(_aims(FIXED, configs[FIXED], AIM_SHARE, ("schedule", "step")))
    for name in (FIXED, "mooncake_both_delta", *DIRECT_READS):
        if name in present:
            parts.append(_slope_aim(name, configs[name]))
    for name in DIRECT_READS:
        if name in present:
            parts.append(_aims(name, configs[name], DIRECT_READ_AIM_SHARE, ("step",)))
            parts += _reads(name, configs[name])
    return "\n\n".join(parts)


def _row(name: str, entry: Document) -> list[str]:
    against = entry["vs_noop"] or {}
    cells = [f"`{name}`"]
    for metric in ("schedule", "overhead", "step"):
        level = entry[f"{metric}_us"] or {}
        cells += [number(level.get("p50")), _ratio(against.get(metric))]
        if metric == "schedule":
            cells.append(interval(entry["slope_us_per_1k_blocks"]["schedule"]))
            cells.append(number((entry["build_meta_us"] or {}).get("p50")))
            cells.append(spread(entry["get_finished_us"]))
    return [*cells, number((entry["tpot_ms"] or {}).get("p50"), 3)]


def _ratio(ratio: Document | None) -> str:
    if ratio is None:
        return DASH
    low, high = ratio["ci95"]
    return f"{ratio['value']:.3f} [{low:.3f}, {high:.3f}]"


def _aims(name: str, entry: Document, share: float, metrics: tuple[str, ...]) -> str:
    said = []
    for metric in metrics:
        if ratio := (entry["vs_noop"] or {}).get(metric):
            verdict = _reached(ratio, 1 + share)
            said.append(f"`{metric}_us` {_ratio(ratio)} {TIMES} noop, {verdict}")
    return (
        f"Aim: `{name}` costs at most {share:.0%} more than `{NOOP}` at p50 "
        f"(95 % interval): {'; '.join(said) or 'no level could be stated'}."
    )


def _reads(name: str, entry: Document) -> list[str]:
    """What peers read in the meantime, if they did: one sentence."""
    reads = entry["reads"]
    if reads is None:
        return []
    per_s, blocks = reads["reads"] / reads["seconds"], reads["blocks_offered"]
    return [
        f"From `{name}` a peer read {reads['reads']:,} prefixes of "
        f"{blocks / reads['reads']:.0f} blocks, {per_s:.1f} a second; "
        f"{reads['blocks_valid'] / blocks:.2%} of the blocks were valid afterwards."
    ]


def _slope_aim(name: str, entry: Document) -> str:
    aim = (
        f"Aim: `schedule()` of `{name}` grows by less than "
        f"{AIM_US_PER_1K_BLOCKS:g} µs per 1,000 blocks"
    )
    slope = entry["slope_us_per_1k_blocks"]["schedule"]
    if slope is None:
        return f"{aim}: no slope could be stated."
    low, high = slope["ci95"]
    zero = "includes" if low <= 0 <= high else "does not include"
    verdict = _reached(slope, AIM_US_PER_1K_BLOCKS)
    return f"{aim}: {interval(slope)}, {verdict}; the interval {zero} 0."


def _reached(estimate: Document, bound: float) -> str:
    """Whether the 95 % interval lies below `bound`, above it, or around it."""
    low, high = estimate["ci95"]
    if high <= bound:
        return "**reached**"
    return "**missed**" if low > bound else "**undecided** in this run"
