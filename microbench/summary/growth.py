# SPDX-License-Identifier: Apache-2.0
"""Verdicts in words, and how each was reached."""

from __future__ import annotations

from collections import Counter

from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.report.document import Table, Verdict, Verdicts, Words
from kvtax.report.markdown import DASH, interval, number, spread
from kvtax.verdict.metrics import ALL_PARTS, LEVELS, MARGIN_US_PER_1K_BLOCKS
from kvtax.verdict.roles import Roles, outcomes
from kvtax.verdict.verdict import RARE
from kvtax.verdict.warnings import open_metrics

PER = "µs per 1,000 cached blocks"
# Words for one config and for several, most important verdict first.
SAID = {
    "grows": ("grows with |cache|", "grow with |cache|"),
    "drifts": ("drifts", "drift"),
    "inconclusive": ("stays undecided", "stay undecided"),
    "failed": ("failed", "failed"),
    "flat": ("does not grow", "do not grow"),
}


def verdicts(document: PerConfig) -> Verdicts:
    """Build the verdicts of all configs, with their evidence."""
    return Verdicts(
        title="Does the cost grow with |cache|?",
        verdicts=[
            Verdict(
                name=name,
                verdict=entry.verdict,
                words=verdict_words(entry),
                reasons=_reasons(entry),
            )
            for name, entry in sorted(
                document.configs.items(),
                key=lambda item: list(SAID).index(item[1].verdict),
            )
        ],
    )


def answer(document: PerConfig) -> str:
    """Summarize in a sentence which configs grow, and how many stay flat."""
    told = []
    for verdict, (one, several) in SAID.items():
        names = [n for n, of in document.configs.items() if of.verdict == verdict]
        if names:
            words = one if len(names) == 1 else several
            which = f" ({', '.join(names)})" if verdict != "flat" else ""
            told.append(f"{len(names)} {words}{which}")
    return f"Of {len(document.configs)} configs, {'; '.join(told)}."


def verdict_words(entry: ConfigEntry) -> str:
    """Describe a config's verdict in a sentence."""
    said = {
        "grows": _growth,
        "flat": _flat,
        "drifts": lambda _: (
            "the cost rises from pass to pass but not with the level, so something "
            "other than |cache| is the cause, such as all that was ever cached"
        ),
        "inconclusive": _undecided,
        "failed": lambda entry: entry.error or "no trial went well",
    }[entry.verdict](entry)
    return f"{said}."


def _growth(entry: ConfigEntry) -> str:
    metric = next(m for m, verdict in entry.verdict_of.items() if verdict == "grows")
    slope = interval(entry.slope_us_per_1k_blocks[metric])
    text = f"{slope} {PER} in {metric} ({entry.held[metric].shape})"
    level = entry.level_us(metric) if metric in LEVELS else None
    if level:
        text += (
            f", p50 {number(level['p50'])} µs at {level['at_cache_blocks']:,} blocks"
        )
    return text


def _flat(entry: ConfigEntry) -> str:
    """State the bounds of the sum of the parts and of the whole step."""
    bounds = {
        ALL_PARTS: "in all its parts together",
        "step_cpu": "in the CPU time of the whole step",
    }
    told = [
        f"{number(entry.held[metric].most_us_per_1k_blocks)} {words}"
        for metric, words in bounds.items()
        if metric in entry.held
    ]
    most = ", ".join(told) or f"{MARGIN_US_PER_1K_BLOCKS:g}"
    falls = any(held.shape == "falls" for held in entry.held.values())
    return f"at most, in {PER}: {most}" + ("; a cost falls with |cache|" * falls)


def _undecided(entry: ConfigEntry) -> str:
    if not entry.held:
        return "too few holds to know any level"
    undecided = open_metrics(entry)
    if not undecided:
        return "the whole step grows, but none of its parts"
    told = []
    for name in undecided:
        held = entry.held[name]
        rare = ", by its rare steps" if held.shape == RARE else ""
        told.append(
            f"{name} (at most {number(held.most_us_per_1k_blocks)} {PER}{rare})"
        )
    return f"undecided in {', '.join(told)}"


def _reasons(entry: ConfigEntry) -> Table | None:
    """Each metric's levels, with its slope and the most that it can rise."""
    if not entry.held:
        return None
    rows = []
    for metric, held in entry.held.items():
        verdict = entry.verdict_of[metric]
        rows.append(
            [
                metric,
                f"{verdict}, {held.shape}" if held.shape else verdict,
                interval(entry.slope_us_per_1k_blocks[metric], 2),
                number(held.most_us_per_1k_blocks, 2),
                number(held.drift_us_per_pass, 1),
                *(number(us) for us in held.us),
            ]
        )
    blocks = next(iter(entry.held.values())).cache_blocks
    return Table(
        title="How the verdict was reached",
        note="Slope through the levels, and the most that a level can lie above a "
        f"lower one (95 %), both in {PER}; drift in µs per pass. Grows: some level "
        "lies above a lower one by more than the margin for certain. Flat: none can.",
        columns=["metric", "verdict", "slope", "at most", "drift"]
        + [f"µs at {n:,} blocks" for n in blocks],
        rows=rows,
    )


def level_table(document: PerConfig) -> Table:
    """One row per config: its times at the stated |cache|."""
    rows = []
    for name, entry in document.configs.items():
        connector = entry.connector
        rows.append(
            [
                name,
                spread(entry.schedule_us),
                spread(entry.overhead_us),
                spread(entry.step_us),
                number(connector.us_per_step if connector else None),
                interval(connector.slope_per_1k_blocks, 2) if connector else DASH,
                interval(entry.growth_slope_us_per_1k_blocks),
                _idle(entry),
            ]
        )
    head = ["config", "schedule µs p50/p90/p99", "overhead µs", "step µs"]
    head += ["connector's calls, µs per step", "their slope µs/1k"]
    head += ["schedule slope in growth µs/1k", "idle: % of a core, steps/s; MiB"]
    window = document.window
    note = "No level could be stated: see the warnings."
    if window:
        note = (
            f"Times are at {window.at_cache_blocks:,} cached blocks, with as many "
            "requests decoding in every config. overhead is schedule, update and the "
            "connector's calls in the worker; step contains everything, the model too. "
            "The slope in growth is that while the cache fills under an open load, as "
            "the reference study measured it; a machine that changes its speed "
            "meanwhile tilts it, so its interval says too little. Idle: what all "
            "processes of the server take when there is nothing to do, and the "
            "memory that they then have (PSS)."
        )
    return Table(title="Levels", note=note, columns=head, rows=rows)


def _idle(entry: ConfigEntry) -> str:
    if not (idle := entry.idle):
        return DASH
    core = number(100 * idle.cpu_s / idle.seconds)
    steps_per_s = number(idle.steps / idle.seconds)
    return f"{core}, {steps_per_s}; {number(entry.pss_mib)}"


def hypothesis(document: PerConfig, roles: Roles, name: str) -> Words:
    """Is the cost of config `name` linear in |cache|?"""
    label = roles.label(name).strip("`")
    said = _hypothesis(name, document.configs[name])
    title = f"H5: is the cost of {label} linear in |cache|?"
    return Words(title=title, paragraphs=[said])


def _hypothesis(name: str, entry: ConfigEntry) -> str:
    if entry.verdict == "failed":
        return f"Not tested: {name} failed ({entry.error})."
    slope = interval(entry.slope_us_per_1k_blocks["schedule"])
    held = entry.held.get("schedule")
    if held is None or entry.verdict_of["schedule"] != "grows":
        return (
            f"Not supported by this run: the schedule() slope of {name} is {slope} "
            f"µs per 1,000 blocks, verdict {entry.verdict_of.get('schedule')}."
        )
    levels = ", ".join(
        f"{us:,.0f} at {n:,}" for us, n in zip(held.us, held.cache_blocks, strict=True)
    )
    said = f"It grows, but not in a straight line: {held.shape}."
    if held.shape == "linear":
        said = "Supported: its levels are consistent with a straight line."
    return (
        f"{said} schedule() of {name}: {slope} µs per 1,000 blocks; "
        f"p50 in µs at so many blocks: {levels}."
    )


def expected_verdicts(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate expected and found verdicts; None if none is expected."""
    found = outcomes(document, roles)
    if not found:
        return None
    head = ["config", "must be", "is called", "so", "by these metrics, µs/1k"]
    rows = []
    for one in found:
        why = _metrics_behind(document.configs[one.config])
        rows.append([one.config, one.expected, one.found, one.kind, why])
    counts = Counter(one.kind for one in found)
    count = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return Table(
        title="Configs whose verdict is known",
        note=f"Known verdicts: {len(found)}, of which {count}.",
        columns=head,
        rows=rows,
    )


def _metrics_behind(entry: ConfigEntry) -> str:
    """Name the metrics with the verdict of the whole, each with its slope and shape."""
    slopes = entry.slope_us_per_1k_blocks
    return "; ".join(
        f"{metric} {interval(slopes[metric])} {entry.held[metric].shape or ''}".strip()
        for metric, verdict in entry.verdict_of.items()
        if verdict == entry.verdict != "flat" and slopes[metric]
    )
