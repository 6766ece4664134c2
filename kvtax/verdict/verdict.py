# SPDX-License-Identifier: Apache-2.0
"""Verdict on whether a step's cost grows with |cache|, and in which shape.

Of each metric (kvtax/verdict/metrics.py) the levels are known at which |cache| was held
(kvtax/stats/held.py). The margin is by how much a level may lie above a lower one and
still be flat.

- grows: a level lies above a lower one, or the straight line rises, by more than the
  margin for certain. All pairs of levels are tested at once, so it need not be a line.
- drifts: it rises by more than that from pass to pass, or with the time since the last
  reset, and for certain not with the level: something else went up, such as all that
  was ever stored.
- flat: for each pair of levels it is excluded that the upper one lies above the lower
  one by the margin or more. A cost that falls with |cache| is flat.
- inconclusive: none of these.

What follows a hold is judged event by event: it grows where each event at the highest
level takes more than any at the lowest, by the margin.

The config's verdict:

- grows: any metric grows, or long steps come more often at higher levels. CPU time of
  all processes alone shows it with two servers only;
- stalls: two or more calls of the connector took 10 ms more than usual;
- drifts: a metric that decides drifts, or memory;
- flat: all that decides was measured, and is flat. The rest has a bound beside it;
- inconclusive: anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvtax.records.per_config import LongCalls, RareSteps
from kvtax.records.run import Verdict
from kvtax.stats.distribution import Floats
from kvtax.stats.held import Fit, falls, growth, most_rise
from kvtax.verdict.holds import CHANCE
from kvtax.verdict.metrics import LONG_CALLS, MEMORY, PROCESSES, RARE, TPOT

# A part that rises by more than so many margins from pass to pass is not flat.
DRIFT_MARGINS = 3
AGE = "age"
# Fewer long calls may be chance.
FEWEST_LONG_CALLS = 2
# Fewer events at a level may all be disturbed.
FEWEST_EVENTS = 2
# Shape of a rise that another server must show, too.
TO_CONFIRM = "to be confirmed"


@dataclass(frozen=True)
class Judgement:
    """Verdict on a metric; `shape` says how it grows, or that it falls, or ages."""

    verdict: Verdict
    shape: str | None = None


def judge_metric(fit: Fit, level: float, margin: float) -> Judgement:
    """Judge one metric; intervals hold in `level` of runs."""
    if (shape := growth(fit, margin, level)) is not None:
        return Judgement("grows", shape)
    most = most_rise(fit, level)
    for which, (least, _) in {
        None: fit.drift_interval(level),
        AGE: fit.age_interval(level),
    }.items():
        if least > margin:
            # Not "with time" where it may grow with the level as well.
            return Judgement("drifts", which) if most < margin else _open()
    # What rises with the age is in the levels, unless it is told from them.
    still = fit.drift_interval(level)[1] < DRIFT_MARGINS * margin
    if most >= margin or not still:
        return _open()
    return Judgement("flat", "falls" if falls(fit, margin, level) else None)


def _open(shape: str | None = None) -> Judgement:
    return Judgement("inconclusive", shape)


def judge_events(low: Floats, high: Floats, margin: float) -> Judgement:
    """Judge events at the lowest and at the highest level, each in own work."""
    if high.min() - low.max() <= margin:
        return Judgement("flat")
    enough = min(len(low), len(high)) >= FEWEST_EVENTS
    return Judgement("grows") if enough else _open(TO_CONFIRM)


def judge_rare(rare: RareSteps | None) -> dict[str, Judgement]:
    """Judge the long steps, where they were counted."""
    if rare is None:
        return {}
    grows = rare.chance < CHANCE
    return {RARE: Judgement("grows", RARE) if grows else Judgement("flat")}


def judge_long_calls(calls: LongCalls | None) -> dict[str, Judgement]:
    """Judge the long calls of the connector, where they were counted."""
    if calls is None:
        return {}
    stalls = calls.count >= FEWEST_LONG_CALLS
    return {LONG_CALLS: Judgement("stalls" if stalls else "flat")}


def confirmed(of: Mapping[str, Judgement], servers: int) -> dict[str, Judgement]:
    """Withdraw the growth of CPU time that neither TPOT nor a second server shows."""
    judged = dict(of)
    grows = judged.get(PROCESSES, _open()).verdict == "grows"
    seen_by_users = judged.get(TPOT, _open()).verdict == "grows"
    if grows and servers < 2 and not seen_by_users:
        judged[PROCESSES] = _open(TO_CONFIRM)
    return judged


def overall_verdict(of: Mapping[str, Judgement], decisive: Collection[str]) -> Verdict:
    """Derive the config's verdict from those of its metrics.

    `decisive` are those that the run should have, and that flat rests on.
    """
    words = {name: judged.verdict for name, judged in of.items()}
    if "grows" in words.values():
        return "grows"
    if "stalls" in words.values():
        return "stalls"
    verdicts = [words.get(name, "inconclusive") for name in decisive]
    if "drifts" in (*verdicts, words.get(MEMORY)):
        return "drifts"
    waits = any(judged.shape == TO_CONFIRM for judged in of.values())
    is_flat = bool(verdicts) and set(verdicts) == {"flat"} and not waits
    return "flat" if is_flat else "inconclusive"
