# SPDX-License-Identifier: Apache-2.0
"""Verdicts in words, and how each was reached."""

from __future__ import annotations

from collections import Counter

from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.report.document import Table, Verdict, Verdicts, Words
from kvtax.report.markdown import DASH, interval, number, spread
from kvtax.verdict.metrics import (
    MARGIN_US_PER_1K_BLOCKS,
    PROCESSES,
    RARE,
    THREADS,
    TIMED,
    TIMED_MANY,
)
from kvtax.verdict.roles import Roles, outcomes
from kvtax.verdict.warnings import open_metrics

PER = "µs per 1,000 cached blocks"
# Words for one config and for several, most important verdict first.
SAID = {
    "grows": ("grows with |cache|", "grow with |cache|"),
    "drifts": ("grows with time, not with |cache|",) * 2,
    "inconclusive": ("is not known", "are not known"),
    "failed": ("failed", "failed"),
    "flat": ("does not grow", "do not grow"),
}
TIMES = (TIMED, TIMED_MANY)
# What a statement names, in that order.
STATED = {
    TIMED: "to what scheduler and connector take of a step",
    TIMED_MANY: "with many requests",
    THREADS: "in other threads",
    "step": "in the whole step",
    PROCESSES: "in the CPU time of all processes",
}


def short_verdict(entry: ConfigEntry) -> str:
    """Give the verdict in a word or two: *grows*, *at most X*, *not known*."""
    if entry.verdict == "flat":
        most_us = max(entry.held[name].most_us for name in TIMES if name in entry.held)
        return f"at most {number(most_us)} µs"
    short = {"inconclusive": "not known", "drifts": "grows with time"}
    return short.get(entry.verdict, entry.verdict)


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
    """State in a sentence what a full cache adds to a step, or at most."""
    if entry.verdict == "failed":
        return f"{entry.error or 'no trial went well'}."
    if not entry.held:
        return "too few holds to know any level."
    added = ", ".join(
        f"{addition(entry, metric)} µs {where}"
        for metric, where in STATED.items()
        if metric in entry.held
    )
    why = reason(entry)
    return f"{f'{why}; ' if why else ''}a full cache adds {added}."


def reason(entry: ConfigEntry) -> str:
    """Name the metrics that a verdict other than flat rests on, and long steps."""
    said = []
    grown = [name for name, of in entry.verdict_of.items() if of == "grows"]
    if entry.not_measured:
        said.append(f"not measured: {', '.join(entry.not_measured)}")
    elif entry.verdict == "drifts":
        said.append(
            "something else than |cache| goes up, such as all blocks ever cached"
        )
    elif entry.verdict == "inconclusive":
        said.append(f"undecided in {', '.join(open_metrics(entry))}")
    elif grown:
        shapes = [entry.held[name].shape for name in grown if name in entry.held]
        said.append(f"{', '.join(grown)} ({(shapes or [RARE])[0]})")
    if entry.rare and any(entry.rare.long):
        counts = ", ".join(map(str, entry.rare.long))
        ms = entry.rare.longer_by_us / 1e3
        said.append(f"steps that took {ms:g} ms longer, by level: {counts}")
    return "; ".join(said)


def addition(entry: ConfigEntry, metric: str) -> str:
    """State what a full cache adds to a metric, in us, or adds at most."""
    if (held := entry.held.get(metric)) is None:
        return DASH
    if entry.verdict_of[metric] == "grows":
        return interval(held.full_adds_us)
    return f"at most {number(held.most_us)}"


def _reasons(entry: ConfigEntry) -> Table | None:
    """Each metric's levels, with its slope and the most that it can rise."""
    if not entry.held:
        return None
    rows = []
    levels = max(len(held.us) for held in entry.held.values())
    for metric, held in entry.held.items():
        verdict = entry.verdict_of[metric]
        rows.append(
            [
                metric,
                f"{verdict}, {held.shape}" if held.shape else verdict,
                interval(held.full_adds_us),
                number(held.most_us),
                number(held.drift_us_per_pass, 1),
                number(held.age_us, 1),
                *(number(us) for us in held.us),
                *(DASH for _ in range(levels - len(held.us))),
            ]
        )
    return Table(
        title="How the verdict was reached",
        note="What the highest level takes more than the lowest, and the most that any "
        "level can lie above a lower one (95 %); drift per pass, and with the time "
        "since a reset, both in µs. Grows: some level lies above a lower one by more "
        f"than the margin for certain, {MARGIN_US_PER_1K_BLOCKS:g} {PER}. Flat: none "
        "can.",
        columns=["metric", "verdict", "full cache adds", "at most", "drift", "age"]
        + [f"level {n}, µs" for n in range(levels)],
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
        if verdict == entry.verdict != "flat" and slopes.get(metric)
    )
