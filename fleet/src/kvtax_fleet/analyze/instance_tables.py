# SPDX-License-Identifier: Apache-2.0
"""The report's tables about the instances: cache, balance, interference, moved KV."""

from __future__ import annotations

from collections.abc import Iterator

from kvtax.records.estimate import Estimate
from kvtax.report.document import Cell, Section, Table, Words
from kvtax.report.markdown import DASH, number

from kvtax_fleet.analyze.analysis import FleetAnalysis, Migration, Repeat
from kvtax_fleet.analyze.frames import TITLES, Levels
from kvtax_fleet.analyze.load import Skew
from kvtax_fleet.analyze.substrate import SubstrateStep
from kvtax_fleet.analyze.what_if import Disagreement
from kvtax_fleet.records.arm import OUR_PROXY

PHASE_TITLES = {
    "before_prefill": "before the request to P",
    "prefill": "P's queue and prefill",
    "handover": "transfer and D's start, to the first token",
    "total": "all of it",
}
ENGINE_PHASE_TITLES = {
    "p_queue": "P's queue",
    "p_prefill": "P's prefill",
    "transfer": "transfer: until D has all of the KV",
    "d_start": "D's start: until it is scheduled",
    "first_token": "D's first token",
}
PHASE_QUANTILES = ("p50", "p90")


def sections(results: FleetAnalysis) -> Iterator[Section]:
    """Yield the tables that have rows; a sentence in place of some that have none."""
    yield _cache_table(results)
    yield from _if_rows(_belief_table(results), _mirror_table(results))
    yield _balance_table(results)
    yield from _if_rows(_accumulation_table(results), _gpu_table(results))
    yield _or_words(
        _interference_table(results),
        "Too few requests, or no prefill beside a decode.",
    )
    yield from _offload_tables(results)
    yield from _if_rows(_moves_table(results))
    yield _or_words(migration_table(results.migration), "No request to simulate with.")
    yield _or_words(
        _substrate_table(results), "No two connectors under one policy in this run."
    )
    yield _or_words(_policies_table(results), "No recorded decisions with snapshots.")


def _if_rows(*tables: Table) -> Iterator[Section]:
    return (table for table in tables if table.rows)


def _or_words(table: Table, otherwise: str) -> Section:
    return table if table.rows else Words(title=table.title, paragraphs=[otherwise])


def _repeats(results: FleetAnalysis) -> Iterator[tuple[str, Repeat]]:
    for arm, entry in results.arms.items():
        many = len(entry.repeats) > 1
        for repeat in entry.repeats:
            yield f"`{arm}`" + (f" r{repeat.repeat}" if many else ""), repeat


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _mean(skew: Skew | None) -> str:
    return number(skew.mean if skew else None, 2)


def level_text(level: Estimate | None) -> str:
    """Format `12.3 [11.9, 12.8]`."""
    if level is None:
        return DASH
    if level.ci95 is None:
        return number(level.value)
    return f"{number(level.value)} [{', '.join(map(number, level.ci95))}]"


def router_notes(results: FleetAnalysis) -> list[str]:
    """List the unknowns of arms behind a router that is not ours."""
    items = []
    for arm, entry in results.arms.items():
        if entry.router == OUR_PROXY:
            continue
        placed = any(repeat.imbalance.tokens for repeat in entry.repeats)
        served = (
            "the instances' own records name the instance of each request"
            if placed
            else "the instance of each request is not known, so balance, interference "
            "and the places of sessions are left out, too"
        )
        items.append(
            f"- `{arm}` ran behind {entry.router}, which records no decisions: its "
            "belief about caches and the decisions of other policies are left out; "
            f"{served}"
        )
    return items


def _cache_table(results: FleetAnalysis) -> Table:
    """Show APC by instance and overall, and whether counters and usage agree."""
    rows: list[list[Cell]] = []
    for label, repeat in _repeats(results):
        overall = repeat.apc.overall
        parts = ", ".join(
            f"{name} {_share(entry.apc)}"
            for name, entry in repeat.apc.instances.items()
        )
        agrees = {None: DASH, True: "yes", False: "**no**"}[overall.agrees]
        shares = _share(overall.apc_usage), _share(overall.apc)
        held = sorted(set(repeat.kv_blocks.values()))
        ends = " to ".join(f"{blocks:,}" for blocks in held[:1] + held[1:][-1:])
        rows.append([label, *shares, agrees, parts or DASH, ends or DASH])
    return Table(
        title="Prefix cache",
        note="By usage: cached over prompt tokens in the requests' usage. By counters: "
        "hit over queried tokens of the instances' counters. KV blocks: the room of "
        "one instance beside its connector's.",
        columns=[
            "arm",
            "APC by usage",
            "by counters",
            "agree",
            "counters by instance",
            "KV blocks of one",
        ],
        rows=rows,
    )


def _belief_table(results: FleetAnalysis) -> Table:
    return Table(
        title="The proxy's belief about caches",
        note="Tokens that the proxy took to be cached at the chosen instance, against "
        "the server's usage (right: within one block).",
        columns=[
            "arm",
            "from",
            "requests",
            "right",
            "believed too much",
            "too little",
            "mean error, tokens",
            "p99 of the error's size",
        ],
        rows=[
            [
                f"`{arm}`",
                entry.cache_state or DASH,
                f"{known.n:,}",
                _share(known.exact),
                _share(known.too_high),
                _share(known.too_low),
                f"{known.mean_error_tokens:+,.0f}",
                number(known.p99_abs_error_tokens, 0),
            ]
            for arm, entry in results.arms.items()
            if (known := entry.belief)
        ],
    )


def _mirror_table(results: FleetAnalysis) -> Table:
    """Compare the proxy's mirror with the exact cache state, where both are known."""
    return Table(
        title="Mirror against KV events",
        note="The mirror is the proxy's belief without KV events. Differences from the "
        "state by KV events: of a prompt, and of all that was cached after the last "
        "request (above 0: the mirror held more).",
        columns=[
            "arm",
            "prompts",
            "mean difference, tokens",
            "held at the end, tokens",
            "gaps in the events",
            "events complete",
        ],
        rows=[
            [
                label,
                f"{mirror.prompts:,}",
                number(mirror.mean_difference_tokens),
                "not counted" if held is None else f"{held:+,}",
                f"{mirror.gaps}",
                "yes" if mirror.complete else "**no**",
            ]
            for label, repeat in _repeats(results)
            if (mirror := repeat.mirror)
            for held in [mirror.held_difference_tokens]
        ],
    )


def _gpu_table(results: FleetAnalysis) -> Table:
    return Table(
        title="GPUs",
        columns=["arm", "GPU", "busy %, mean", "MiB, most", "W, mean", "samples"],
        rows=[
            [
                label,
                gpu,
                number(use.utilization_percent),
                number(use.memory_used_mib_max, 0),
                number(use.power_w, 0),
                f"{use.samples}",
            ]
            for label, repeat in _repeats(results)
            for gpu, use in (repeat.gpu or {}).items()
        ],
    )


def _balance_table(results: FleetAnalysis) -> Table:
    rows: list[list[Cell]] = []
    for label, repeat in _repeats(results):
        tokens = repeat.imbalance.tokens
        rows.append(
            [
                label,
                number(repeat.imbalance.max_over_min, 2),
                _mean(repeat.hotspot),
                number(repeat.hotspot.p99 if repeat.hotspot else None, 2),
                ", ".join(f"{name} {n / 1e3:,.0f}" for name, n in tokens.items()),
            ]
        )
    return Table(
        title="Balance",
        note="Token imbalance: max/min over the instances of prompt and generated "
        "tokens (a dash: an instance served none). Hotspot index: max/mean of the "
        "tokens under way, over the time of the steady window in which any are; 1 is "
        "even.",
        columns=[
            "arm",
            "token imbalance",
            "hotspot mean",
            "hotspot p99",
            "thousand tokens by instance",
        ],
        rows=rows,
    )


def _accumulation_table(results: FleetAnalysis) -> Table:
    rows: list[list[Cell]] = []
    for label, repeat in _repeats(results):
        lives = repeat.accumulation
        if lives is None:
            continue
        sessions, tokens = lives.sessions.values(), lives.tokens.values()
        rows.append(
            [
                label,
                f"{max(held.peak for held in sessions)}",
                _mean(lives.sessions_skew),
                number(max(held.peak for held in tokens) / 1e3, 0),
                _mean(lives.tokens_skew),
            ]
        )
    return Table(
        title="Accumulated sessions",
        note="In the steady window. A session lives at the instance of its latest "
        "request, until its next request or its end.",
        columns=[
            "arm",
            "most sessions at one instance",
            "max/mean over time",
            "most thousand context tokens at one",
            "max/mean over time",
        ],
        rows=rows,
    )


def _interference_table(results: FleetAnalysis) -> Table:
    return Table(
        title="Interference",
        note="Slope of TPOT over the new tokens that waited for a first token at the "
        "same instance while the request decoded (mean over its decode).",
        columns=["arm", "requests", "ms of TPOT per 1,000 tokens", "TPOT without, ms"],
        rows=[
            [
                f"`{arm}`",
                f"{found.n:,}",
                _slope_text(found.slope_ms_per_ktoken),
                number(found.base_ms, 2),
            ]
            for arm, entry in results.arms.items()
            if (found := entry.interference)
        ],
    )


def _slope_text(level: Estimate) -> str:
    return f"{level:+,.3f}" if level.ci95 else f"{level.value:+.3f}"


def _offload_tables(results: FleetAnalysis) -> Iterator[Section]:
    """Yield nothing if no arm has a policy that prefills elsewhere."""
    found = {a: e.offloads for a, e in results.arms.items() if e.offloads}
    rows: list[list[Cell]] = [
        [
            f"`{arm}`",
            f"{counts.requests:,}",
            f"{counts.begun:,} ({counts.begun / max(counts.requests, 1):.1%})",
            f"{counts.used:,}",
            _counts(counts.failures),
            _counts(counts.kept),
        ]
        for arm, counts in found.items()
    ]
    if not rows:
        return
    columns = ["arm", "requests", "prefilled elsewhere", "KV used", "failed"]
    yield Table(title="Offloads", columns=[*columns, "heavy, kept"], rows=rows)
    proxy_phases = {arm: offloads.phases_ms for arm, offloads in found.items()}
    engine_phases = {arm: offloads.engine_phases_ms for arm, offloads in found.items()}
    for levels, titles, seen_by in (
        (proxy_phases, PHASE_TITLES, "by the proxy's clock"),
        (engine_phases, ENGINE_PHASE_TITLES, "as both engines recorded them"),
    ):
        if phases := _phase_rows(levels, titles):
            yield Table(
                title=f"Phases of offloads, {seen_by}",
                note="Offloads whose KV was used; ms.",
                columns=["arm", "phase", *PHASE_QUANTILES],
                rows=phases,
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


def _moves_table(results: FleetAnalysis) -> Table:
    return Table(
        title="Migrated sessions",
        note="A moved turn against the turn before it of the same session: medians "
        "over the pairs. Other differences between the two turns are in them, too.",
        columns=[
            "arm",
            "moves",
            "KV arrived",
            "thousand tokens moved",
            "fewer tokens under way there",
            "TTFT added, ms",
            "TPOT saved, ms",
            "pairs",
        ],
        rows=[
            [
                f"`{arm}`",
                f"{moves.decided:,}",
                f"{moves.arrived:,}",
                number(moves.moved_tokens / 1e3, 0),
                number(moves.relief_tokens, 0),
                _signed(moves.ttft_added_ms),
                _signed(moves.tpot_saved_ms),
                f"{moves.pairs:,}",
            ]
            for arm, entry in results.arms.items()
            if (moves := entry.moves)
        ],
    )


def _counts(counts: dict[str, int]) -> str:
    return "; ".join(f"{count} {why}" for why, count in counts.items()) or DASH


def _signed(value: float | None) -> str:
    return DASH if value is None else f"{value:+,.1f}"


def migration_table(migration: Migration | None) -> Table:
    """Show the rules that a session was long enough for; name the others."""
    title = "Migrating sessions, simulated"
    columns = ["sessions move", "token imbalance", "hotspot mean", "chances", "moves"]
    columns += ["transfer ms in all", "longest, ms"]
    if migration is None:
        return Table(title=title, columns=columns, rows=[])
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
    return Table(
        title=title,
        note=note,
        columns=columns,
        rows=[
            [
                "never" if every is None else f"every {every} turns",
                number(rule.max_over_min, 2),
                _mean(rule.hotspot),
                f"{rule.chances}",
                f"{rule.migrations}",
                number(rule.transfer_ms_total, 0),
                number(rule.transfer_ms_max, 1),
            ]
            for rule in rules
            for every in [rule.every_turns]
            if every is None or rule.chances
        ],
    )


def _substrate_table(results: FleetAnalysis) -> Table:
    steps = [step for chain in results.substrate for step in chain.steps]
    places = {step.layer: step.place for step in steps}
    layers = sorted(places, key=places.__getitem__)
    return Table(
        title="Substrate",
        note="ms; first a level, then what each connector adds to the one before, with "
        "95 % intervals over sessions and runs.",
        columns=["", "policy", *layers],
        rows=[
            [
                f"{TITLES[chain.metric]} {chain.quantile}",
                f"{chain.policy}@{chain.concurrency}",
                *(_step(by_layer.get(layer)) for layer in layers),
            ]
            for chain in results.substrate
            for by_layer in [{step.layer: step for step in chain.steps}]
        ],
    )


def _step(step: SubstrateStep | None) -> str:
    if step is None or step.level is None:
        return DASH
    if step.added is None:
        return number(step.level.value)
    return f"{step.added:+,.2f}" if step.added.ci95 else DASH


def _policies_table(results: FleetAnalysis) -> Table:
    """Show how often another policy would have chosen another instance."""
    entries = {a: e.offline for a, e in results.arms.items() if e.offline}
    policies = list(next(iter(entries.values()), {}))
    return Table(
        title="Policies on the same snapshots",
        note="Share of the arm's recorded snapshots (first repeat) on which the policy "
        "of the column chooses another instance. The policy that ran, in brackets, "
        "must be at 0.",
        columns=["arm", *policies],
        rows=[
            [f"`{arm}`", *(_other(offline[name]) for name in policies)]
            for arm, offline in entries.items()
        ],
    )


def _other(entry: Disagreement | None) -> str:
    if entry is None:
        return DASH
    share = _share(entry.other_instance)
    return f"({share})" if entry.ran else share
