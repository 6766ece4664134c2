# SPDX-License-Identifier: Apache-2.0
"""The report's tables about the instances: cache, balance, interference, moved KV.

A table has a row for each arm, or each run, that has something to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvtax.records.estimate import Estimate
from kvtax.report.document import Cell, Section, Table
from kvtax.report.markdown import DASH, number

from kvtax_fleet.analyze.analysis import FleetAnalysis, Migration, Repeat
from kvtax_fleet.analyze.frames import Levels
from kvtax_fleet.analyze.load import Skew

PHASES = {
    "by the proxy's clock": {
        "before_prefill": "before the request to P",
        "prefill": "P's queue and prefill",
        "handover": "transfer and D's start, to the first token",
        "total": "all of it",
    },
    "as both engines recorded them": {
        "p_queue": "P's queue",
        "p_prefill": "P's prefill",
        "transfer": "transfer: until D has all of the KV",
        "d_start": "D's start: until it is scheduled",
        "first_token": "D's first token",
    },
}
PHASE_QUANTILES = ("p50", "p90")

Columns = dict[str, Callable[[Any], Cell]]


def sections(results: FleetAnalysis) -> Iterator[Section]:
    """Yield the tables that have rows."""
    runs = list(_repeats(results))
    arms = [(f"`{arm}`", entry) for arm, entry in results.arms.items()]
    yield from _table("Prefix cache", CACHE_NOTE, runs, CACHE)
    yield from _table("Balance", BALANCE_NOTE, runs, BALANCE)
    interfering = [(arm, entry.interference) for arm, entry in arms]
    yield from _table("Interference", INTERFERENCE_NOTE, interfering, INTERFERENCE)
    moved = [(arm, entry.offloads) for arm, entry in arms]
    yield from _table("Offloads", "", moved, OFFLOADS)
    yield from _phase_tables(results)
    yield from migration_table(results.migration)


def _table(
    title: str, note: str, things: Iterable[tuple[str, Any]], columns: Columns
) -> Iterator[Table]:
    """Yield a table with a row for each thing that is there; nothing without rows."""
    rows = [
        [label, *(cell(thing) for cell in columns.values())]
        for label, thing in things
        if thing is not None
    ]
    if rows:
        yield Table(title=title, note=note, columns=["arm", *columns], rows=rows)


def _repeats(results: FleetAnalysis) -> Iterator[tuple[str, Repeat]]:
    for arm, entry in results.arms.items():
        many = len(entry.repeats) > 1
        for repeat in entry.repeats:
            yield f"`{arm}`" + (f" r{repeat.repeat}" if many else ""), repeat


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _yes(value: bool | None) -> str:
    return {None: DASH, True: "yes", False: "**no**"}[value]


def _mean(skew: Skew | None) -> str:
    return number(skew.mean if skew else None, 2)


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or DASH


def _blocks(repeat: Repeat) -> str:
    held = sorted(set(repeat.kv_blocks.values()))
    return " to ".join(f"{blocks:,}" for blocks in held[:1] + held[1:][-1:]) or DASH


def _slope(level: Estimate) -> str:
    return f"{level:+,.3f}" if level.ci95 else f"{level.value:+.3f}"


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{count} {why}" for why, count in counts.items()) or DASH


CACHE_NOTE = (
    "By usage: cached over prompt tokens in the requests' usage. By counters: hit over "
    "queried tokens of the instances' counters. KV blocks: the room of one instance "
    "beside its connector's."
)
CACHE: Columns = {
    "APC by usage": lambda run: _share(run.apc.overall.apc_usage),
    "by counters": lambda run: _share(run.apc.overall.apc),
    "agree": lambda run: _yes(run.apc.overall.agrees),
    "counters by instance": lambda run: _listed(
        f"{name} {_share(entry.apc)}" for name, entry in run.apc.instances.items()
    ),
    "KV blocks of one": _blocks,
}
BALANCE_NOTE = (
    "Token imbalance: max/min over the instances of prompt and generated tokens (a "
    "dash: an instance served none). Hotspot index: max/mean of the tokens under way, "
    "over the time of the steady window in which any are; 1 is even."
)
BALANCE: Columns = {
    "token imbalance": lambda run: number(run.imbalance.max_over_min, 2),
    "hotspot mean": lambda run: _mean(run.hotspot),
    "hotspot p99": lambda run: number(run.hotspot and run.hotspot.p99, 2),
    "thousand tokens by instance": lambda run: _listed(
        f"{name} {n / 1e3:,.0f}" for name, n in run.imbalance.tokens.items()
    ),
}
INTERFERENCE_NOTE = (
    "Slope of TPOT over the new tokens that waited for a first token at the same "
    "instance while the request decoded (mean over its decode)."
)
INTERFERENCE: Columns = {
    "requests": lambda line: f"{line.n:,}",
    "ms of TPOT per 1,000 tokens": lambda line: _slope(line.slope_ms_per_ktoken),
    "TPOT without, ms": lambda line: number(line.base_ms, 2),
}
OFFLOADS: Columns = {
    "requests": lambda of: f"{of.requests:,}",
    "prefilled elsewhere": lambda of: (
        f"{of.begun:,} ({of.begun / max(of.requests, 1):.1%})"
    ),
    "KV used": lambda of: f"{of.used:,}",
    "failed": lambda of: _counts(of.failures),
    "heavy, kept": lambda of: _counts(of.kept),
}


def level_text(level: Estimate | None) -> str:
    """Format `12.3 [11.9, 12.8]`."""
    if level is None:
        return DASH
    if level.ci95 is None:
        return number(level.value)
    return f"{number(level.value)} [{', '.join(map(number, level.ci95))}]"


def _phase_tables(results: FleetAnalysis) -> Iterator[Table]:
    moving = {arm: e.offloads for arm, e in results.arms.items() if e.offloads}
    proxy = {arm: offloads.phases_ms for arm, offloads in moving.items()}
    engines = {arm: offloads.engine_phases_ms for arm, offloads in moving.items()}
    for levels, (seen_by, titles) in zip((proxy, engines), PHASES.items(), strict=True):
        if rows := _phase_rows(levels, titles):
            yield Table(
                title=f"Phases of offloads, {seen_by}",
                note="Offloads whose KV was used; ms.",
                columns=["arm", "phase", *PHASE_QUANTILES],
                rows=rows,
            )


def _phase_rows(
    phases: dict[str, dict[str, Levels]], titles: dict[str, str]
) -> list[list[Cell]]:
    """Make a row for each arm and phase; none for an arm without any."""
    rows: list[list[Cell]] = []
    for arm, levels in phases.items():
        if any(levels[phase]["p50"] for phase in titles):
            for phase, title in titles.items():
                cells = [level_text(levels[phase][at]) for at in PHASE_QUANTILES]
                first = f"`{arm}`" if phase == next(iter(titles)) else ""
                rows.append([first, title, *cells])
    return rows


def migration_table(migration: Migration | None) -> Iterator[Table]:
    """Show the rules that a session was long enough for; name the others."""
    if migration is None:
        return
    rules = migration.policies
    untried = [
        f"{rule.every_turns}"
        for rule in rules
        if rule.every_turns is not None and not rule.chances
    ]
    note = (
        f"The requests of `{migration.of}` on sticky sessions, with the times of "
        f"the run; {migration.kv_bytes_per_token:,} bytes of KV per token "
        f"({migration.model}) over {migration.bandwidth_gbit_s:g} Gbit/s."
    )
    if untried:
        note += f" Not tried: every {', '.join(untried)} turns; no session is so long."
    tried = [
        ("never" if every is None else f"every {every} turns", rule)
        for rule in rules
        for every in [rule.every_turns]
        if every is None or rule.chances
    ]
    for table in _table(
        "Migrating sessions, simulated",
        note,
        tried,
        {
            "token imbalance": lambda rule: number(rule.max_over_min, 2),
            "hotspot mean": lambda rule: _mean(rule.hotspot),
            "chances": lambda rule: f"{rule.chances}",
            "moves": lambda rule: f"{rule.migrations}",
            "transfer ms in all": lambda rule: number(rule.transfer_ms_total, 0),
            "longest, ms": lambda rule: number(rule.transfer_ms_max, 1),
        },
    ):
        table.columns[0] = "sessions move"
        yield table
