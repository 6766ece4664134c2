# SPDX-License-Identifier: Apache-2.0
"""Changes between two sweeps, or between two cells of one connector.

Two sweeps are compared in vLLM's own work, so a machine that is slower today is no
change, unless it is slower by more than MOST_APART: then nothing is called changed. A
cost has changed if the interval of the difference leaves out 0, where all
intervals of the table hold at once (Bonferroni): of twenty comparisons of unchanged
code, one may have a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import hypot
from typing import Any

import msgspec

from kvtax.records.estimate import Estimate
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.per_config import Judged, PerConfig
from kvtax.stats.distribution import t_quantile
from kvtax.stats.processes import look_level
from kvtax.verdict.axes import ALL, AXES, growth
from kvtax.verdict.bounds import Check, Checker, Outcome
from kvtax.verdict.limits import (
    DEFAULT,
    LimitsFile,
    check_cell,
    check_config,
    check_since,
    require_known,
)
from kvtax.verdict.metrics import is_part

LEVEL = 0.95
# Degrees of freedom of a sweep's spread between servers.
DEGREES = 12
# Verdicts in the order of their cost; *inconclusive* has no place.
SEVERITY = {"flat": 0, "drifts": 1, "stalls": 2, "grows": 2, "failed": 3}
# Settings that do not change the numbers: names, and how much was measured.
HARMLESS = {"name", "summary", "configs", "repeats", "most_repeats", "minutes"}
HARMLESS |= {"load.ladder.passes"}
MACHINE = ("cpu_model", "cpu_count", "gpu_model")
# Shares of own work agreed between sweeps in which it differed by a factor of 2.4. With
# 6.5 the walk's was two thirds higher: memory was so slow that what reads much of it
# lost more (docs/benchmarks.md).
MOST_APART = 2.5


class NotComparable(Exception):
    """OLD and NEW measured different things; the message names them."""

    exit_code = 2


@dataclass(frozen=True)
class Change:
    """Change of one cost; None where it was not measured.

    `changed` is whether the difference is certainly not 0.
    """

    subject: str
    cost: str
    old: Estimate | None
    new: Estimate | None
    difference: Estimate | None = None
    changed: bool = False


@dataclass(frozen=True)
class Comparison:
    """Two documents of one kind: checks, a table of changes, and its doubts."""

    unit: str
    facts: dict[str, tuple[Any, Any]]
    checks: list[Check]
    changes: list[Change]
    verdicts: dict[str, tuple[str, str]]
    cautions: list[str]


FACTS = ("date_utc", "git_commit", "git_dirty", "vllm_version", "cpu_model", "host")


def compare_sweeps(
    old: PerConfig, new: PerConfig, limits: LimitsFile | None = None
) -> Comparison:
    """Compare two sweeps and check limits. Raises NotComparable and ConfigError."""
    _require_same_profile(old, new)
    limits = limits or LimitsFile()
    require_known(limits, new)
    changes = sweep_changes(old, new)
    names = dict.fromkeys([*new.configs, *old.configs, *limits.configs])
    checks = []
    for name in names:
        if name != DEFAULT:
            checks += _check_sweep(old, new, name, limits)
    checks += [_no_dearer(change, limits) for change in changes if change.changed]
    return Comparison(
        unit="% of vLLM's own work",
        facts=_facts(old.provenance, new.provenance),
        checks=checks,
        changes=changes,
        verdicts={
            name: (_verdict_of(old, name), _verdict_of(new, name))
            for name in names
            if name != DEFAULT
        },
        cautions=_cautions(old, new),
    )


def _verdict_of(document: PerConfig, name: str) -> str:
    return document.configs[name].verdict if name in document.configs else "not there"


def compare_gates(
    old: CellRecord, new: CellRecord, limits: LimitsFile | None = None
) -> Comparison:
    """Compare two cells of one connector. Raises NotComparable and ConfigError."""
    if old.connector != new.connector:
        raise NotComparable(
            f"OLD is of the connector {old.connector}, NEW of {new.connector}"
        )
    checks = check_cell(new, limits) if limits else []
    checks += check_since(new, old, "OLD")
    return Comparison(
        unit="µs per step and unit of the axis",
        facts=_facts(old.provenance, new.provenance),
        checks=checks,
        changes=gate_changes(old, new),
        verdicts={},
        cautions=[],
    )


def sweep_changes(old: PerConfig, new: PerConfig) -> list[Change]:
    """List the changes of every config of both runs, in own work.

    Of runs whose machines are not comparable none is certain.
    """
    pairs = []
    for name in new.configs:
        if name in old.configs:
            before, after = _costs(old.configs[name]), _costs(new.configs[name])
            pairs += [(name, cost, before[cost], after[cost]) for cost in after]
    known = sum(before is not None and after is not None for *_, before, after in pairs)
    looks = max(old.profile.looks, new.profile.looks)
    wider = _wider(known, look_level(looks))
    changes = [_change(*pair, wider) for pair in pairs]
    if are_comparable(old, new):
        return changes
    return [replace(change, changed=False) for change in changes]


def are_comparable(old: PerConfig, new: PerConfig) -> bool:
    """Return whether own work took about as long; True where a run does not say."""
    before, after = _own_us(old), _own_us(new)
    if not before or not after:
        return True
    return max(before, after) <= MOST_APART * min(before, after)


def _own_us(document: PerConfig) -> float | None:
    return document.machine.own_us if document.machine else None


def _costs(entry: Judged) -> dict[str, Estimate | None]:
    shares = {
        "over the baseline": entry.over_baseline,
        "a full cache adds": entry.full_adds,
        "a full cache adds to a token": entry.tpot_full_adds,
    }
    return {cost: share.percent if share else None for cost, share in shares.items()}


def _wider(count: int, level: float) -> float:
    """Return by how much intervals widen so that `count` of them hold at once."""
    if not count:
        return 1.0
    tails = [(1 - LEVEL) / 2 / count, (1 - level) / 2]
    all_at_once, each = (float(t_quantile(1 - tail, DEGREES)) for tail in tails)
    return all_at_once / each


def _change(
    subject: str, cost: str, old: Estimate | None, new: Estimate | None, wider: float
) -> Change:
    if old is None or new is None or old.ci95 is None or new.ci95 is None:
        return Change(subject, cost, old, new)
    value = new.value - old.value
    below = wider * hypot(new.value - new.low, old.high - old.value)
    above = wider * hypot(new.high - new.value, old.value - old.low)
    difference = Estimate(value, (value - below, value + above))
    changed = not difference.low <= 0 <= difference.high
    return Change(subject, cost, old, new, difference, changed)


def gate_changes(old: CellRecord, new: CellRecord) -> list[Change]:
    """List the changes of the slopes of all calls together, axis by axis."""
    changes = []
    for axis in new.means_us:
        before, after = (growth(cell, axis, f"{ALL}_us") for cell in (old, new))
        was, now = (along.slope if along else None for along in (before, after))
        cost = f"slope, µs per {AXES[axis].per_unit}"
        changes.append(_change(axis, cost, was, now, wider=1.0))
    return changes


def _no_dearer(change: Change, limits: LimitsFile) -> Check:
    """Check that a certain change is not a rise."""
    rises = change.difference is not None and change.difference.value > 0
    outcome: Outcome = "broken" if rises else "kept"
    value = f"{change.difference:+,.3g} %"
    checker = Checker(change.subject, limits.strict)
    return checker.check(f"{change.cost}, since OLD", "no more", value, outcome)


def _check_sweep(
    old: PerConfig, new: PerConfig, name: str, limits: LimitsFile
) -> list[Check]:
    checker = Checker(name, limits.strict)
    if name not in new.configs:
        outcome: Outcome = "broken" if name in limits.configs else "undecided"
        return [checker.check("verdict", "measured", "not in NEW", outcome)]
    verdict = checker.check("verdict", *_verdict(old, new, name, limits))
    return [verdict, *check_config(name, new, limits)]


def _verdict(
    old: PerConfig, new: PerConfig, name: str, limits: LimitsFile
) -> tuple[str, str, Outcome]:
    """Return the bound, the verdict with the parts that grow, and the outcome."""
    now, allowed = new.configs[name].verdict, limits.of(name).verdicts
    value = ", ".join([now, *_growing_parts(new.configs[name])])
    if allowed is not None:
        bound = " or ".join(allowed) or "none"
        if now in allowed:
            return bound, value, "kept"
        return bound, value, "undecided" if now == "inconclusive" else "broken"
    if name not in old.configs:
        known: Outcome = "kept" if now == "flat" else "undecided"
        return "not in OLD", value, "broken" if now == "failed" else known
    before = old.configs[name].verdict
    bound = f"no worse than {before}"
    if now == "failed" or SEVERITY.get(now, 0) > SEVERITY.get(before, 0):
        return bound, value, "broken"
    unclear = now == "inconclusive" != before
    return bound, value, "undecided" if unclear else "kept"


def _growing_parts(entry: Judged) -> Iterator[str]:
    """Yield the methods and threads to which a full cache certainly adds."""
    for part, held in entry.held.items():
        if entry.verdict == "grows" and is_part(part) and held.full_adds.low > 0:
            yield f"`{part}` {held.full_adds.value:+.3g} % of own work"


def _facts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {fact: (old.get(fact), new.get(fact)) for fact in FACTS}


def _cautions(old: PerConfig, new: PerConfig) -> list[str]:
    """List reasons to distrust the comparison."""
    reasons = []
    if not are_comparable(old, new):
        reasons.append(
            f"vLLM's own work took {_own_us(old):,.0f} µs in OLD and "
            f"{_own_us(new):,.0f} µs in NEW. Shares of it agree up to a "
            f"factor of {MOST_APART:g}, so no cost is called changed. "
            "Measure both on one machine, in one hour."
        )
    differing = [
        f"{key} {old.provenance.get(key)!r} and {new.provenance.get(key)!r}"
        for key in MACHINE
        if old.provenance.get(key) != new.provenance.get(key)
    ]
    if differing:
        reasons.append(
            f"Different machines, {'; '.join(differing)}: costs over the baseline "
            "agreed between two CPUs, growth that reads much memory did not. Measure "
            "OLD again on NEW's."
        )
    if old.baseline != new.baseline:
        reasons.append(
            f"The baselines differ, {old.baseline} and {new.baseline}: what is over "
            "them is not comparable."
        )
    before, after = _settings(old), _settings(new)
    if in_one := sorted(set(before) ^ set(after)):
        reasons.append(f"Only one of the two profiles has {', '.join(in_one)}.")
    for which, document in (("OLD", old), ("NEW", new)):
        reasons += [f"{which} warns: {text}" for text in document.warnings]
    return reasons


def _require_same_profile(old: PerConfig, new: PerConfig) -> None:
    """Check the profiles. Raises NotComparable with each setting that differs."""
    before, after = _settings(old), _settings(new)
    differing = [
        f"{key}: {before[key]!r} and {after[key]!r}"
        for key in before
        if key in after and before[key] != after[key]
    ]
    if differing:
        raise NotComparable(
            "OLD and NEW were measured with different profiles "
            f"({'; '.join(differing)}): measure both with the same one"
        )


def _settings(document: PerConfig) -> dict[str, Any]:
    """Return all settings by dotted name, without the harmless ones."""
    settings = _flat(msgspec.to_builtins(document.profile))
    return {key: value for key, value in settings.items() if key not in HARMLESS}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        own = _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{key}": value} if own is None else own
    return flat
