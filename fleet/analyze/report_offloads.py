# SPDX-License-Identifier: Apache-2.0
"""The report's sections about what was replayed, and about KV that moved."""

from __future__ import annotations

from fleet.analyze.report_fleet import level_text
from fleet.analyze.workload import SPREADS
from lab.stats.markdown import DASH, Document, number, table

TITLES = {
    "before_prefill": "before P is asked",
    "prefill": "P's queue and prefill",
    "handover": "transfer and D's start, to the first token",
    "total": "all of it",
}
ENGINE_TITLES = {
    "p_queue": "P's queue",
    "p_prefill": "P's prefill",
    "transfer": "transfer: until D has all of the KV",
    "d_start": "D's start: until it is scheduled",
    "first_token": "D's first token",
}
QUANTILES = ("p50", "p90")


def workload_table(document: Document) -> str:
    made = document["workload"]
    if made is None:
        return "No request."
    rows = [
        [name, *(DASH if spread is None else number(spread[at], 0) for at in SPREADS)]
        for name, spread in made["spreads"].items()
    ]
    note = (
        f"{made['requests']:,} requests of {made['sessions']:,} sessions in each run, "
        f"as asked for; {made['prefill_share']:.1%} of their tokens are prompts'."
    )
    return table(["", *SPREADS], rows) + "\n\n" + note


def offload_table(document: Document) -> str:
    """Nothing where no arm has a policy that prefills elsewhere."""
    told = {a: e["offloads"] for a, e in document["arms"].items() if e["offloads"]}
    if not told:
        return ""
    rows = [
        [
            f"`{arm}`",
            f"{one['requests']:,}",
            f"{one['begun']:,} ({one['begun'] / max(one['requests'], 1):.1%})",
            f"{one['used']:,}",
            _counts(one["failures"]),
            _counts(one["kept"]),
        ]
        for arm, one in told.items()
    ]
    head = [
        "arm",
        "requests",
        "prefilled elsewhere",
        "KV used",
        "failed",
        "heavy, kept",
    ]
    parts = ["## Offloads", table(head, rows)]
    for field, titles, seen_by in (
        ("phases_ms", TITLES, "the proxy saw them"),
        ("engine_phases_ms", ENGINE_TITLES, "both engines recorded them"),
    ):
        if phases := _phase_rows(told, field, titles):
            parts += [
                f"Of those whose KV was used, ms as {seen_by}:",
                table(["arm", "phase", *QUANTILES], phases),
            ]
    return "\n\n".join(parts)


def _phase_rows(
    told: dict[str, Document], field: str, titles: dict[str, str]
) -> list[list[str]]:
    """A row for each arm and phase; none for an arm without any."""
    rows = []
    for arm, one in told.items():
        levels = one[field]
        if any(levels[phase]["p50"] for phase in titles):
            for phase, title in titles.items():
                cells = [level_text(levels[phase][quantile]) for quantile in QUANTILES]
                first = f"`{arm}`" if phase == next(iter(titles)) else ""
                rows.append([first, title, *cells])
    return rows


def moves_table(document: Document) -> str:
    """Nothing where no policy moves sessions."""
    rows = [
        [
            f"`{arm}`",
            f"{one['decided']:,}",
            f"{one['arrived']:,}",
            number(one["moved_tokens"] / 1e3, 0),
            number(one["relief_tokens"], 0),
            _signed(one["ttft_added_ms"]),
            _signed(one["tpot_saved_ms"]),
            f"{one['pairs']:,}",
        ]
        for arm, entry in document["arms"].items()
        if (one := entry["moves"])
    ]
    if not rows:
        return ""
    head = ["arm", "moves", "KV arrived", "thousand tokens moved"]
    head += [
        "fewer tokens under way there",
        "TTFT added, ms",
        "TPOT saved, ms",
        "pairs",
    ]
    note = (
        "A move's turn against the turn before it of the same session: medians over "
        "the pairs. What else differs between the two turns is in them, too."
    )
    return "\n\n".join(["## Migrated sessions", table(head, rows), note])


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{count} {why}" for why, count in counts.items()) or DASH


def _signed(value: float | None) -> str:
    return DASH if value is None else f"{value:+,.1f}"
