# SPDX-License-Identifier: Apache-2.0
"""Statements on a run in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import Judged, PerConfig
from kvtax.records.run import RunRecord
from kvtax.report.markdown import DASH, number
from kvtax.verdict.metrics import (
    AFTER_IDLE,
    CALLS,
    CALLS_MANY,
    HIT,
    LONG_CALLS,
    LONG_PROMPT,
    MEMORY,
    METRICS,
    PREFILL,
    PROCESSES,
    RARE,
    STEP,
    THREADS,
    TIMED,
    TIMED_MANY,
    TPOT,
)
from kvtax.verdict.roles import ExpectedVerdict, Roles, outcomes

QUESTION = (
    "What does a KV connector cost per engine step, and does that grow with |cache|, "
    "the number of cached block hashes?"
)
# Verdicts in a table, most important first.
WORDS = {
    "grows": "**grows**",
    "stalls": "**stalls**",
    "drifts": "grows with time",
    "inconclusive": "not known",
    "failed": "failed",
    "flat": "flat",
}
# Metrics in prose.
NAMES = {
    CALLS: "the connector's calls",
    CALLS_MANY: "its calls with many requests",
    TIMED: "scheduler and connector",
    TIMED_MANY: "both with many requests",
    PREFILL: "its calls in prefill steps",
    THREADS: "its threads' CPU time",
    PROCESSES: "all processes' CPU time",
    TPOT: "the time per output token",
    STEP: "the whole step",
    AFTER_IDLE: "a request after idleness",
    HIT: "a prompt that hits",
    LONG_PROMPT: "a long prompt",
    MEMORY: "memory",
    RARE: "steps 1 ms longer than usual",
    LONG_CALLS: "calls over 10 ms",
}
# Shown beside the table, where they stand out.
BESIDE = (AFTER_IDLE, HIT, LONG_PROMPT, THREADS, PROCESSES, STEP)


def growing_first(document: PerConfig) -> list[str]:
    """List the configs, those that grow first."""
    order = list(WORDS)
    configs = document.configs
    return sorted(configs, key=lambda name: order.index(configs[name].verdict))


def answer(document: PerConfig) -> list[str]:
    """Answer the question: what a user's token pays, and which configs grow.

    A run that is refused has no answer.
    """
    if document.machine and document.machine.refused:
        return ["There is no answer: too few servers had their cores to themselves."]
    return [line for line in (_tokens(document), _growth(document)) if line]


def _tokens(document: PerConfig) -> str:
    """State what a full cache adds to a user's token; empty where it is not known."""
    grown, others_us = [], []
    for name, entry in document.configs.items():
        adds, held = entry.tpot_full_adds, entry.held.get(TPOT)
        if adds is None or held is None or held.unit is None:
            continue
        if entry.verdict_of.get(TPOT) == "grows":
            ends = (adds.percent.low * held.unit, adds.percent.high * held.unit)
            grown.append(f"{Estimate(adds.us, ends):+,.0f} µs with {name}")
        else:
            others_us.append(held.most * held.unit)
    if others_us:
        which = "each other config" if grown else "every config"
        grown.append(f"at most {max(others_us):,.0f} µs with {which}")
    return f"A full cache adds to a user's token {', '.join(grown)}." if grown else ""


# Verbs for one config and for several, most important first.
VERBS = {
    "grows": ("grows with |cache|", "grow with |cache|"),
    "stalls": ("stalls in calls of 10 ms and more",) * 2,
    "drifts": ("grows with time", "grow with time"),
    "inconclusive": ("is not known", "are not known"),
    "failed": ("failed", "failed"),
}


def _growth(document: PerConfig) -> str:
    """Name the configs that grow, and bound the others."""
    parts = []
    for verdict, (singular, plural) in VERBS.items():
        names = [n for n, e in document.configs.items() if e.verdict == verdict]
        if names:
            verb = singular if len(names) == 1 else plural
            parts.append(f"{len(names)} {verb} ({', '.join(names)})")
    flat = [entry for entry in document.configs.values() if entry.verdict == "flat"]
    bounds = [
        entry.held[name].most
        for entry in flat
        for name in (CALLS if CALLS in entry.held else TIMED,)
        if name in entry.held
    ]
    if bounds:
        parts.append(
            f"to {len(flat)} a full cache adds at most {max(bounds):.1f} % of own work"
        )
    return f"Of {len(document.configs)} configs, {'; '.join(parts)}."


def remarks(document: PerConfig) -> Iterator[str]:
    """Yield what stands out beside the table, config by config."""
    for name, entry in document.configs.items():
        lines = list(_remarks(entry))
        if lines:
            yield f"`{name}`: {'; '.join(lines)}"


def _remarks(entry: Judged) -> Iterator[str]:
    if entry.not_measured:
        yield f"not measured: {', '.join(NAMES[n] for n in entry.not_measured)}"
    added = [
        f"{_us(held.full_adds, held.unit)} to {NAMES[name]}"
        for name in BESIDE
        if entry.verdict_of.get(name) == "grows" and (held := entry.held.get(name))
    ]
    if added:
        yield f"a full cache adds {', '.join(added)}"
    if entry.verdict_of.get(RARE) == "grows":
        yield f"{NAMES[RARE]} come more often with more blocks cached"
    for name, judged in entry.verdict_of.items():
        held = entry.held.get(name)
        if judged == "drifts" and held:
            unit = " MiB" if name == MEMORY else " %"
            yield f"{NAMES[name]} rises by {held.drift_per_pass:,.1f}{unit} a pass"
        if judged == "grows" and name == MEMORY and held:
            yield f"a full cache takes {held.full_adds.value:,.0f} MiB more"
        if held and held.shape == "falls":
            levels = ", ".join(f"{level:,.1f}" for level in held.levels)
            yield f"{NAMES[name]} falls: {levels} % by level"
    grown = entry.verdict_of.get(TIMED) or entry.verdict_of.get(CALLS)
    shape = next((entry.held[n].shape for n in (CALLS, TIMED) if n in entry.held), None)
    if entry.verdict == "grows" and grown and shape not in (None, "linear", "falls"):
        yield f"its shape is {shape}"
    token = entry.tpot_over_baseline
    if token and token.percent.low > 0 and entry.over_baseline:
        beyond = token.percent.low - entry.over_baseline.percent.high
        if beyond > 0:
            yield (
                f"a token takes {token.us:+,.0f} µs over the baseline, "
                f"{token.percent:+.1f} %, more than its steps show"
            )


def _us(share: Estimate, unit: float | None) -> str:
    return f"{share.value * (unit or 0):+,.0f} µs"


def not_measured(document: PerConfig) -> str:
    """Name the metrics that no config of the run has, in a line."""
    every = {name for entry in document.configs.values() for name in entry.verdict_of}
    missing = [NAMES[name] for name in METRICS if name not in every]
    if not any(entry.long_calls for entry in document.configs.values()):
        missing.append(NAMES[LONG_CALLS])
    return f"Not measured: {', '.join(missing)}." if missing else ""


def machine(document: PerConfig) -> str:
    """Render the grade of the machine with its grounds."""
    graded, facts = document.machine, document.provenance
    where = f"vLLM {facts.get('vllm_version')}"
    if graded is None:
        return f"{where}. Machine: not graded, as the run did not record it."
    reasons = "; ".join(graded.reasons[:3])
    more = len(graded.reasons) - 3
    if more > 0:
        reasons += f"; and {more} more"
    grade = f"**{graded.grade}**" + (f": {reasons}" if reasons else "")
    cold = [server.cold_start for server in graded.servers if server.cold_start]
    starts = f" {len(cold)} servers started cold: {cold[0]}." if cold else ""
    return f"{where}, {graded.cores} cores. Machine {grade}.{starts}"


def paired(run: RunRecord) -> str:
    """Render the costs that were measured by pairs inside one process."""
    return "\n".join(
        f"In turns in one process ({pairs.quartets} quartets, {pairs.processes} "
        f"processes), `{pairs.config}` takes "
        + " and ".join(f"{cost.ratio:.3f} times ({cost.part})" for cost in pairs.costs)
        + f" the CPU time of `{pairs.baseline}`."
        for pairs in run.pairs
    )


def unit(document: PerConfig) -> str:
    """Explain own work, and how far two equal configs are apart in it."""
    graded, noise = document.machine, document.noise_floor
    about = f", about {graded.own_us:,.0f} µs here" if graded and graded.own_us else ""
    text = (
        f"Costs are shares of vLLM's own work in the same steps{about}: a slower "
        "machine makes both longer. Intervals hold the next server's figure."
    )
    if noise.pair and noise.over_baseline:
        apart = noise.over_baseline.percent
        text += f" {noise.pair[1]} is {noise.pair[0]} again: {apart:+.1f} % apart."
    return text


def model_note(document: PerConfig) -> str:
    """Describe the profile and the kind of model."""
    profile = document.profile
    if not profile.null_model:
        return f"Profile {profile.name}, a real model."
    us = profile.forward_us
    slept = f"sleeps {us:g} µs" if us else "takes no time"
    return (
        f"Profile {profile.name}: no GPU; the null model's forward returns zeros and "
        f"{slept}. Engine, scheduler, block pool and connectors are the real ones."
    )


def expected(document: PerConfig, roles: Roles) -> tuple[list[ExpectedVerdict], str]:
    """Return the verdicts that are known before, and how many came out right."""
    known = outcomes(document, roles)
    if not known:
        return [], ""
    counts = Counter(outcome.kind for outcome in known)
    count = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return known, f"Known verdicts: {len(known)}, of which {count}."


def long_calls(entry: Judged) -> str:
    """Count the long calls; a dash where they are not known."""
    if (calls := entry.long_calls) is None:
        return DASH
    if not calls.count:
        return "0"
    return f"{calls.count}, up to {number(calls.longest_ms, 0)} ms"
