# SPDX-License-Identifier: Apache-2.0
"""Compare two runs, check limits, and render the outcome as Markdown."""

from __future__ import annotations

from kvtax.records.per_config import PerConfig, Quantiles
from kvtax.report.markdown import DASH, TIMES, interval, spread, table
from kvtax.stats import Estimate
from kvtax.verdict.aims import Check, headline
from kvtax.verdict.limits import LimitsFile, check_runs, require_known
from kvtax.verdict.run_changes import (
    Change,
    baseline_of,
    cautions,
    change,
    level_us,
    require_same_profile,
)

FACTS = ("date_utc", "git_commit", "git_dirty", "vllm_version", "cpu_model", "host")
NOTE = (
    f"Slopes are µs per 1,000 cached blocks, levels µs. {TIMES} OLD: p50 in NEW over "
    "p50 in OLD, each as a multiple of its run's baseline. The change of a slope is "
    "stated at the baseline's speed in OLD, so a slower machine is no change. "
    "**Bold**: a changed verdict, or a change beyond the 95 % intervals and the noise "
    "floors of both runs. No interval of a level is narrower than the difference of "
    "two runs of one config."
)


def compare(
    old: PerConfig, new: PerConfig, limits: LimitsFile | None = None
) -> list[Check]:
    """Check NEW against OLD and `limits`. Raises NotComparable and ConfigError."""
    require_same_profile(old, new)
    limits = limits or LimitsFile()
    require_known(limits, old, new)
    return check_runs(old, new, limits)


def markdown(old: PerConfig, new: PerConfig, checks: list[Check]) -> str:
    """Render the comparison as Markdown."""
    sections = [
        f"# {headline(checks)}",
        _provenance(old, new),
        *_listed("Read this first", cautions(old, new)),
        *_open(checks),
        "## All limits",
        f"<details>\n\n{_checks_table(checks)}\n\n</details>",
        "## What changed",
        _changes_table(old, new),
        NOTE,
    ]
    return "\n\n".join(sections) + "\n"


def _provenance(old: PerConfig, new: PerConfig) -> str:
    rows = [
        [fact, *(str(d.provenance.get(fact, DASH)) for d in (old, new))]
        for fact in FACTS
    ]
    return table(["", "OLD", "NEW"], rows)


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def _open(checks: list[Check]) -> list[str]:
    """Return the sections of broken and of undecided limits."""
    parts = []
    for outcome in ("broken", "undecided"):
        # One line for all configs with the same outcome.
        alike: dict[tuple[str, str, str, bool], list[str]] = {}
        for check in checks:
            if check.outcome == outcome:
                key = check.what, check.found, check.bound, check.fails
                alike.setdefault(key, []).append(f"`{check.config}`")
        lines = [
            f"{', '.join(configs)}: {what} is {found}; limit: {bound}"
            + (" (**fails**)" if fails and outcome == "undecided" else "")
            for (what, found, bound, fails), configs in alike.items()
        ]
        parts += _listed(outcome.capitalize(), lines)
    return parts


def _checks_table(checks: list[Check]) -> str:
    rows = [
        [f"`{check.config}`", check.what, check.bound, check.found, check.outcome]
        for check in checks
    ]
    return table(["config", "what", "limit", "NEW", ""], rows)


def _changes_table(old: PerConfig, new: PerConfig) -> str:
    rows = []
    for name in dict.fromkeys([*old.configs, *new.configs]):
        entries = [d.configs[name] for d in (old, new) if name in d.configs]
        measured = dict.fromkeys(metric for e in entries for metric in e.verdict_of)
        rows += [_row(old, new, name, metric) for metric in measured]
    head = ["config", "metric", "verdict", "slope OLD", "slope NEW", "change"]
    head += ["p50/p90 OLD", "p50/p90 NEW", f"{TIMES} OLD"]
    return table(head, rows)


def _row(old: PerConfig, new: PerConfig, name: str, metric: str) -> list[str]:
    entries = [document.configs.get(name) for document in (old, new)]
    verdicts = [entry.verdict_of.get(metric) if entry else None for entry in entries]
    slopes = [
        entry.slope_us_per_1k_blocks.get(metric) if entry else None for entry in entries
    ]
    levels = [level_us(entry, metric) if entry else None for entry in entries]
    found = change(old, new, name, metric) if all(entries) else None
    return [
        f"`{name}`",
        metric,
        _verdict(*verdicts),
        *(interval(slope) for slope in slopes),
        _slope_change(found),
        *(_level(level) for level in levels),
        _times_old(found, name == baseline_of(new)),
    ]


def _verdict(before: str | None, after: str | None) -> str:
    if before == after:
        return before or DASH
    return f"**{before or DASH} \N{RIGHTWARDS ARROW} {after or DASH}**"


def _level(level: Quantiles | None) -> str:
    return spread(level, names=("p50", "p90"))


def _slope_change(found: Change | None) -> str:
    return _bold(
        found.slope if found else None, "+.1f", bool(found and found.slope_changed)
    )


def _times_old(found: Change | None, is_baseline: bool) -> str:
    if is_baseline:
        return "baseline"
    return _bold(
        found.times_old if found else None, ".2f", bool(found and found.level_changed)
    )


def _bold(number: Estimate | None, spec: str, changed: bool) -> str:
    if number is None:
        return DASH
    return f"**{number:{spec}}**" if changed else f"{number:{spec}}"
