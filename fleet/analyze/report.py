# SPDX-License-Identifier: Apache-2.0
"""report.md from the document analysis.json: every number in it is from there."""

from __future__ import annotations

from fleet.analyze.frames import LATENCIES, TITLES
from fleet.analyze.report_fleet import (
    accumulation_table,
    balance_table,
    cache_table,
    gpu_table,
    interference_table,
    level_text,
    migration_table,
    mirror_table,
    policies_table,
    routers_note,
    substrate_table,
)
from fleet.analyze.report_offloads import (
    moves_table,
    offload_table,
    workload_table,
)
from fleet.analyze.report_paired import paired_table
from fleet.analyze.runs import REACH
from fleet.analyze.sessions import MIN_REQUESTS, QUANTILES, REPLICATES
from fleet.policies.size_class import CLASSES, LIMITS
from lab.stats.markdown import DASH, Document, table

SHOWN_WARNINGS = 6
REACHING = f"{100 * REACH:g} % of equal arms"
# Of a comparison, what is said first: the middle, and what a slow request meets.
ANSWERED = ("p50", "p90")
FIGURES = {
    "comparison": "Differences against the baseline; grey: what equal arms reach",
    "latency": "Latencies of each arm",
    "interference": "TPOT against the prefill under way at the same instance",
    "sessions": "Sessions living at each instance over time, first repeat",
    "substrate": "What each connector adds, p50 and p90",
}


def write_report(document: Document, figures: list[str]) -> str:
    """The whole text; `figures` are the names in figures/ that were drawn."""
    title = document["experiment"] or "run"
    sections = [
        f"# Fleet: {title}",
        answers(document),
        "## Workload",
        workload_table(document),
        "## Outcomes",
        outcome_table(document),
        routers_note(document),
        "## Latency",
        latency_tables(document),
        "## Against the baseline",
        comparison_table(document),
        paired_table(document),
        "## Prefix cache",
        cache_table(document),
        mirror_table(document),
        "## Balance",
        balance_table(document),
        accumulation_table(document),
        gpu_table(document),
        "## Interference",
        interference_table(document),
        offload_table(document),
        moves_table(document),
        "## Migrating sessions, simulated",
        migration_table(document),
        "## Substrate",
        substrate_table(document),
        "## Policies on the same snapshots",
        policies_table(document),
        "## Figures",
        "\n\n".join(
            f"{FIGURES[name]} ([data](figures/{name}.csv)):\n\n"
            f"![{FIGURES[name]}](figures/{name}.png)"
            for name in figures
        )
        or "None.",
        "## Warnings",
        warnings(document),
        "## How this was made",
        made(document),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def answers(document: Document) -> str:
    """p50 and p90 of each comparison, refusals first, then the noise floor."""
    lines = []
    for c in document["comparisons"]:
        if c["refused"]:
            lines.append(f"- **Not compared: `{c['arm']}` with `{c['baseline']}`**")
            lines += [f"  - {reason}" for reason in c["refused"]]
    held = [c for c in document["comparisons"] if not c["refused"]]
    for compared in held:
        if not compared["same"]:
            lines.append(f"- **`{compared['arm']}` against `{compared['baseline']}`**")
            lines += [f"  - {_answer(compared, quantile)}" for quantile in ANSWERED]
    for pair in held:
        if pair["same"]:
            again = f"`{pair['arm']}` is `{pair['baseline']}` run again"
            lines.append(f"- Noise floor: {again} and differs by")
            lines += [f"  - {q}: {_differences(pair, q)}" for q in ANSWERED]
    if any(pair["same"] for pair in held):
        lines.append(f"- Reach: {REACHING} differ by no more than")
        lines += [f"  - {q}: {_reaches(held[0], q)}" for q in ANSWERED]
    elif document["made"]["virtual"]:
        lines.append("- In virtual time, two equal arms are equal to the byte.")
    else:
        lines.append(
            "- No A/A pair in this run: nothing says how much two equal arms differ."
        )
    doubts = len(document["warnings"])
    if doubts:
        lines.append(f"- {doubts} [warnings](#warnings): read them before the numbers.")
    return "\n".join(lines)


def _answer(compared: Document, quantile: str) -> str:
    metrics: dict[str, list[str]] = {}
    for metric, title in TITLES.items():
        metrics.setdefault(compared["verdicts"][metric][quantile], []).append(title)
    said = "; ".join(f"{', '.join(which)} {word}" for word, which in metrics.items())
    return f"{quantile}: **{said}**: {_differences(compared, quantile)}"


def _differences(compared: Document, quantile: str) -> str:
    return ", ".join(
        f"{TITLES[metric]} {percent(compared['percent'][metric][quantile])}"
        for metric in TITLES
    )


def _reaches(compared: Document, quantile: str) -> str:
    return ", ".join(
        f"{TITLES[metric]} {reach_text(compared['reach'][metric][quantile])}"
        for metric in TITLES
    )


def reach_text(reach: list[float] | None) -> str:
    """`-4.0 to +4.2 %`; a dash where no A/A pair tells."""
    return DASH if reach is None else f"{reach[0]:+.1f} to {reach[1]:+.1f} %"


def percent(level: Document | None) -> str:
    """`+1.2 % [+0.4, +2.0]`; a dash where nothing was measured."""
    if level is None:
        return DASH
    text = f"{level['value']:+.1f} %"
    if level["ci95"] is None:
        return f"{text} (no interval)"
    return f"{text} [{level['ci95'][0]:+.1f}, {level['ci95'][1]:+.1f}]"


def outcome_table(document: Document) -> str:
    rows, modes = [], []
    for arm, entry in document["arms"].items():
        counts = entry["outcomes"]
        if counts is None:
            rows.append([f"`{arm}`", DASH, "0", DASH, DASH, "no request"])
            continue
        rows.append(
            [
                f"`{arm}`",
                entry["policy"] or DASH,
                f"{len(entry['repeats'])}",
                f"{counts['ok']}/{counts['n']}",
                f"{counts['failed']}",
                f"{counts['cancelled']}",
            ]
        )
        modes += [
            f"- `{arm}`: {count} requests {mode}"
            for mode, count in counts["modes"].items()
        ]
        modes += [
            f"- `{arm}`: {count} prefilled where they decode instead: {why}"
            for why, count in counts["fallbacks"].items()
        ]
    head = ["arm", "policy", "repeats", "OK/N", "failed", "cancelled"]
    return "\n\n".join(filter(None, [table(head, rows), "\n".join(modes)]))


def latency_tables(document: Document) -> str:
    """The steady window in full; its classes, and all requests, folded away."""
    names = {"steady": "steady window", "all": "all requests"}
    parts = []
    for window, text in names.items():
        for kind in ("all", *CLASSES):
            rows = _latency_rows(document, window, kind)
            if not rows:
                continue
            head = ["arm", "n (sessions)", "ms"]
            head += ["TTFT", "TPOT", "E2E", "TTFT from send", "E2E from send"]
            title = text if kind == "all" else f"{text}, {kind}"
            if parts:
                summary = f"<details><summary>{title}</summary>"
                parts.append(f"{summary}\n\n{table(head, rows)}\n\n</details>")
            else:
                parts.append(f"In the {title}:\n\n{table(head, rows)}")
    note = (
        "Milliseconds with 95 % intervals over sessions "
        f"({REPLICATES} replicates), which do not hold how much the next run would "
        "differ: to compare arms, read the next section. TTFT and E2E from the "
        "intended send, then from the actual one. p90 needs "
        f"{MIN_REQUESTS['p90']} requests, p99 {MIN_REQUESTS['p99']}. Classes "
        f"by new tokens (prompt less cached): {LIMITS}. "
        "A policy decides what is cached and so which class a request is in: between "
        "arms, a class does not hold the same requests."
    )
    return "\n\n".join([*parts, note])


def _latency_rows(document: Document, window: str, kind: str) -> list[list[str]]:
    rows = []
    for arm, entry in document["arms"].items():
        own = entry["latency"].get(window, {}).get(kind)
        if own is None:
            continue
        for quantile in QUANTILES:
            levels = [own[name][quantile] for name in LATENCIES]
            if any(levels):
                first = quantile == "p50"
                rows.append(
                    [
                        f"`{arm}`" if first else "",
                        f"{own['n']:,} ({own['sessions']})" if first else "",
                        quantile,
                        *(level_text(level) for level in levels),
                    ]
                )
    return rows


def comparison_table(document: Document) -> str:
    rows = []
    for compared in document["comparisons"]:
        arm = f"`{compared['arm']}`" + (" (A/A)" if compared["same"] else "")
        against = f"`{compared['baseline']}`"
        if compared["refused"]:
            rows.append([arm, against, "", "", "**refused**", "", ""])
            continue
        first = [arm, against, f"{compared['n']} ({compared['window']})"]
        for quantile in QUANTILES:
            cells = [_difference(compared, metric, quantile) for metric in TITLES]
            rows.append([*(first if quantile == "p50" else [""] * 3), quantile, *cells])
    if not rows:
        return "No arm beside its baseline: nothing to compare."
    held = next((c for c in document["comparisons"] if c["reach"]), None)
    for quantile in QUANTILES if held else ():
        cells = [reach_text(held["reach"][metric][quantile]) for metric in TITLES]
        first = ["reach of equal arms"] if quantile == "p50" else [""]
        rows.append([*first, "", "", quantile, *cells])
    note = (
        "Of the same requests: those that ended ok and were in the steady window in "
        "every repeat of both arms, or in any window where these are too few. The "
        "intervals (95 %) are over sessions and runs. Higher or lower: the whole "
        f"interval lies beyond the reach: {REACHING} differ by no more, by the runs of "
        "all A/A pairs."
    )
    head = ["arm", "against", "requests", "", "TTFT", "TPOT", "E2E"]
    return table(head, rows) + "\n\n" + note


def _difference(compared: Document, metric: str, quantile: str) -> str:
    """With what may be said of it; of an A/A pair it is the noise itself."""
    level = compared["percent"][metric][quantile]
    if level is None or compared["same"]:
        return percent(level)
    return f"{percent(level)}: {compared['verdicts'][metric][quantile]}"


def warnings(document: Document) -> str:
    """By kind and message, so that one cause in many runs reads as one.

    Each kind ends with what to do about it.
    """
    kinds: dict[str, dict[str, list[str]]] = {}
    remedies = {one["kind"]: one["remedy"] for one in document["warnings"]}
    for one in document["warnings"]:
        where = "" if one["arm"] is None else f"`{one['arm']}`"
        where += "" if one["repeat"] is None else f" r{one['repeat']}"
        kinds.setdefault(one["kind"], {}).setdefault(one["message"], []).append(where)
    lines = []
    for kind, messages in kinds.items():
        lines.append(f"- **{kind.replace('_', ' ')}**")
        shown = list(messages.items())[:SHOWN_WARNINGS]
        for message, where in shown:
            named = ", ".join(filter(None, where))
            lines.append(f"  - {named}: {message}" if named else f"  - {message}")
        if more := len(messages) - len(shown):
            lines.append(f"  - and {more} more in analysis.json")
        lines.append(f"  - **What to do:** {remedies[kind]}")
    return "\n".join(lines) or "None."


def made(document: Document) -> str:
    """Load, fleet and versions, so that the run can be repeated."""
    made = document["made"]
    trace, versions = made["trace"], made["versions"]
    facts = {
        "command": versions.get("command_line"),
        "commit": versions.get("git_commit"),
        "vLLM": versions.get("vllm_version"),
        "cores": versions.get("cpu_count"),
        "CPU": versions.get("cpu_model"),
        "GPU": versions.get("gpu_model"),
        "trace": trace.get("source") or trace.get("file"),
        "sha256 of what was replayed": trace.get("sha256"),
        "sessions": trace.get("sessions"),
        "requests": trace.get("requests"),
        "instances": made["instances"],
        "open loop": made["open_loop"],
        "time scale": made["time_scale"],
        "simulated forward, times": made["time_factor"],
        "virtual time": made["virtual"] or None,
    }
    return "\n".join(f"- {k}: `{v}`" for k, v in facts.items() if v is not None)
