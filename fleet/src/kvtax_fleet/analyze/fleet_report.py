# SPDX-License-Identifier: Apache-2.0
"""The report of a fleet run, as a page made from analysis.json.

Here: the ranking, then requests and comparisons.
kvtax_fleet.analyze.instance_tables has the tables about the instances. Every number is
from analysis.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvtax.records.estimate import Estimate
from kvtax.records.files import write_document, write_whole
from kvtax.records.warning import RunWarning
from kvtax.report import render
from kvtax.report.document import Cell, Page, Section, Table, Words
from kvtax.report.markdown import DASH, number
from kvtax.stats.distribution import REPLICATES
from kvtax.stats.processes import REACH
from kvtax.stats.quantiles import MIN_REQUESTS, QUANTILES

from kvtax_fleet.analyze import instance_tables
from kvtax_fleet.analyze.analysis import FleetAnalysis, analyse
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.comparison import NO_DIFFERENCE, Comparison, Paired, Reaches
from kvtax_fleet.analyze.frames import LATENCIES, TITLES
from kvtax_fleet.analyze.ranking import Rank
from kvtax_fleet.analyze.request_tables import WorkloadSpread
from kvtax_fleet.policies.decision import CLASSES, LIMITS

# Messages that are shown of one kind of warning; analysis.json has all.
SHOWN_MESSAGES = 6
REACHING = f"{100 * REACH:g} % of equal arms"
SPREADS = WorkloadSpread.__struct_fields__
SHOWN_VERDICTS = {NO_DIFFERENCE: "no significant difference"}
WINDOWS = {"steady": "steady window", "all": "all requests"}
# The model whose KV a migrated session would move, and over which link.
MOVED_MODEL, MOVED_OVER_GBIT_S = "qwen3-coder-30b-a3b", 100.0


def write_reports(run_dir: Path, out: Path) -> bool:
    """Write analysis.json, report.md and report.html; return whether sound.

    Raises RecordsError, HardwareError and ConfigError, with nothing written.
    """
    analysis = analyse(read_run(run_dir), MOVED_MODEL, MOVED_OVER_GBIT_S)
    out.mkdir(parents=True, exist_ok=True)
    write_document(out / "analysis.json", analysis.results)
    page = report_page(analysis.results)
    write_whole(out / "report.md", render.markdown(page).encode())
    write_whole(out / "report.html", render.html(page).encode())
    return analysis.sound


def report_page(results: FleetAnalysis) -> Page:
    """Make the page of a run."""
    sections: list[Section] = [
        *ranking_table(results),
        workload_table(results),
        *outcome_sections(results),
        *latency_sections(results),
        *comparison_sections(results),
        *instance_tables.sections(results),
        _provenance(results),
    ]
    return Page(
        title=f"Fleet: {results.experiment or 'run'}",
        question="",
        answer=answers(results),
        warnings=list(_shown_warnings(results)),
        sections=sections,
        made="Made by `kvtax fleet analyze`.",
    )


def answers(results: FleetAnalysis) -> list[str]:
    """Name doubts and refusals, then the best arm of each load."""
    lines = [
        f"- **Doubtful ({warning.kind})**: {warning.message}"
        for warning in _shown_warnings(results)
    ]
    lines += [
        f"- **Not compared: `{c.arm}` with `{c.baseline}`**: " + "; ".join(c.refused)
        for c in results.comparisons
        if c.refused
    ]
    for concurrency, ranks in by_load(results.ranking).items():
        best, *others = ranks
        open_ones = [f"`{r.arm}`" for r in others if not _is_worse(r)]
        text = (
            f"- {load_words(concurrency)}**`{best.arm}`** has the shortest mean E2E, "
        )
        text += f"{best.e2e_ms:,.0f} ms"
        if open_ones:
            text += f"; not told from it: {', '.join(open_ones)}"
        lines.append(f"{text}.")
    return lines


def by_load(ranking: list[Rank]) -> dict[int | None, list[Rank]]:
    """Group the ranks by requests in flight per instance."""
    loads: dict[int | None, list[Rank]] = {}
    for rank in ranking:
        loads.setdefault(rank.concurrency, []).append(rank)
    return loads


def load_words(concurrency: int | None) -> str:
    """Begin a sentence about a load; nothing where the load is not known."""
    if concurrency is None:
        return ""
    plural = "s" if concurrency > 1 else ""
    return f"At {concurrency} request{plural} in flight per instance, "


def _is_worse(rank: Rank) -> bool:
    return rank.verdict.startswith("higher")


def ranking_table(results: FleetAnalysis) -> list[Section]:
    """Show the arms of each load by mean E2E; nothing with a single arm."""
    rows: list[list[Cell]] = []
    for ranks in by_load(results.ranking).values():
        rows += [
            [
                f"`{rank.arm}`",
                f"**{_word(rank.verdict)}**",
                number(rank.e2e_ms, 0),
                f"{rank.against_best:+.1f}" if rank.against_best else DASH,
                number(rank.ttft_p90_ms, 0),
                rank.policy or DASH,
            ]
            for rank in ranks
        ]
    if not rows:
        return []
    over = f"sessions and {results.ranking[0].repeats} repeats"
    if results.made.virtual:
        over += (
            ", each an order of the sessions: a run in virtual time gives the same "
            "bytes again, so no machine is in them"
        )
    note = (
        "The arms of a load are compared request by request, over those that ended ok "
        f"in all of them. Intervals are 95 %, over {over}."
    )
    columns = ["arm", "verdict", "mean E2E, ms", "over the best, %", "TTFT p90, ms"]
    return [Table(title="Ranking", note=note, columns=[*columns, "policy"], rows=rows)]


def _word(verdict: str) -> str:
    return SHOWN_VERDICTS.get(verdict, verdict)


def reach_text(reach: list[float] | None) -> str:
    """Format `-4.0 to +4.2 %`; a dash without an A/A pair."""
    return DASH if reach is None else f"{reach[0]:+.1f} to {reach[1]:+.1f} %"


def percent(level: Estimate | None) -> str:
    """Format `+1.2 % [+0.4, +2.0]`; a dash where nothing was measured."""
    if level is None:
        return DASH
    text = f"{level.value:+.1f} %"
    if level.ci95 is None:
        return f"{text} (no interval)"
    return f"{text} [{level.ci95[0]:+.1f}, {level.ci95[1]:+.1f}]"


def workload_table(results: FleetAnalysis) -> Section:
    """Show lengths and sessions as requested."""
    made = results.workload
    if made is None:
        return Words(title="Workload", paragraphs=["No request."])
    return Table(
        title="Workload",
        note=f"{made.requests:,} requests of {made.sessions:,} sessions in each "
        f"run, as requested; {made.prefill_share:.1%} of their tokens are prompts'.",
        columns=["", *SPREADS],
        rows=[
            [name, *(number(getattr(spread, at, None), 0) for at in SPREADS)]
            for name, spread in made.spreads.items()
        ],
    )


def outcome_sections(results: FleetAnalysis) -> list[Section]:
    """Count the requests of each arm by outcome, and name every failure."""
    rows: list[list[Cell]] = []
    items = []
    for arm, entry in results.arms.items():
        counts = entry.outcomes
        if counts is None:
            rows.append([f"`{arm}`", DASH, "0", DASH, DASH, "no request"])
            continue
        rows.append(
            [
                f"`{arm}`",
                entry.policy or DASH,
                f"{len(entry.repeats)}",
                f"{counts.ok}/{counts.n}",
                f"{counts.failed}",
                f"{counts.cancelled}",
            ]
        )
        items += [f"- `{arm}`: {n} requests {mode}" for mode, n in counts.modes.items()]
        items += [
            f"- `{arm}`: {n} requests prefilled where they decode instead: {why}"
            for why, n in counts.fallbacks.items()
        ]
    columns = ["arm", "policy", "repeats", "OK/N", "failed", "cancelled"]
    table = Table(title="Outcomes", columns=columns, rows=rows)
    return [table, Words(title="Outcomes", paragraphs=items)] if items else [table]


def latency_sections(results: FleetAnalysis) -> list[Section]:
    """Show the steady window; its classes, and all requests, behind their titles."""
    note = (
        "Milliseconds with 95 % intervals over sessions "
        f"({REPLICATES} replicates), without the difference between runs: to compare "
        "arms, read the next section. TTFT and E2E from the intended send, then from "
        f"the actual one. p90 needs {MIN_REQUESTS['p90']} requests, p99 "
        f"{MIN_REQUESTS['p99']}. Classes by new tokens (prompt less cached): {LIMITS}. "
        "A policy decides what is cached, and so the class of a request: between arms, "
        "a class does not hold the same requests."
    )
    tables: list[Section] = []
    for window, name in WINDOWS.items():
        for kind in ("all", *CLASSES):
            if not (rows := _latency_rows(results, window, kind)):
                continue
            title = name if kind == "all" else f"{name}, {kind}"
            tables.append(
                Table(
                    title=title if tables else f"Latency: {title}",
                    note="" if tables else note,
                    columns=[
                        "arm",
                        "n (sessions)",
                        "ms",
                        "TTFT",
                        "TPOT",
                        "E2E",
                        "TTFT from send",
                        "E2E from send",
                    ],
                    rows=rows,
                    open=not tables,
                )
            )
    return tables or [Words(title="Latency", paragraphs=["No request ended ok."])]


def _latency_rows(results: FleetAnalysis, window: str, kind: str) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for arm, entry in results.arms.items():
        own = entry.latency.get(window, {}).get(kind)
        if own is None:
            continue
        for quantile in QUANTILES:
            levels = [getattr(own, name)[quantile] for name in LATENCIES]
            if any(levels):
                first = quantile == "p50"
                rows.append(
                    [
                        f"`{arm}`" if first else "",
                        f"{own.n:,} ({own.sessions})" if first else "",
                        quantile,
                        *(instance_tables.level_text(level) for level in levels),
                    ]
                )
    return rows


def comparison_sections(results: FleetAnalysis) -> list[Section]:
    """Show every comparison with its verdicts, and the reach of equal arms."""
    title = "Against the baseline"
    rows: list[list[Cell]] = []
    for compared in results.comparisons:
        arm = f"`{compared.arm}`" + (" (A/A)" if compared.same else "")
        against = f"`{compared.baseline}`"
        if compared.percent is None:
            rows.append([arm, against, "", "", "**refused**", "", ""])
            continue
        first = [arm, against, f"{compared.n} ({compared.window})"]
        for quantile in QUANTILES:
            cells = [_difference(compared, metric, quantile) for metric in TITLES]
            rows.append([*(first if quantile == "p50" else [""] * 3), quantile, *cells])
    if not rows:
        return [Words(title=title, paragraphs=["Nothing to compare: a single arm."])]
    reach: Reaches = {}
    if not results.made.virtual:
        reach = next((c.reach for c in results.comparisons if c.reach), reach)
    for quantile in QUANTILES if reach else ():
        cells = [reach_text(reach[metric][quantile]) for metric in TITLES]
        name = "reach of equal arms" if quantile == "p50" else ""
        rows.append([name, "", "", quantile, *cells])
    note = (
        "The same requests in both arms: those that ended ok and were in the steady "
        "window in every repeat of both, or in any window where these are too few. "
        "Intervals (95 %) are over sessions and runs. Higher or lower: "
    )
    note += (
        "0 is not in the interval."
        if results.made.virtual
        else f"the whole interval lies beyond the reach ({REACHING} differ by no more, "
        "by the runs of all A/A pairs)."
    )
    columns = ["arm", "against", "requests", "", *TITLES.values()]
    table = Table(title=title, note=note, columns=columns, rows=rows)
    return [table, *_paired_table(results)]


def _difference(compared: Comparison, metric: str, quantile: str) -> str:
    """Format a difference with its verdict; that of an A/A pair is the noise itself."""
    level = compared.difference(metric, quantile)
    if level is None or compared.same:
        return percent(level)
    return f"{percent(level)}: {_word(compared.verdict(metric, quantile))}"


def _paired_table(results: FleetAnalysis) -> list[Section]:
    """Compare means and count the faster requests; nothing in real time."""
    rows: list[list[Cell]] = [
        [
            f"`{compared.arm}`",
            f"`{compared.baseline}`",
            f"{max(known.n for known in metrics.values() if known):,}",
            *(
                f"{known.percent:+,.1f}" if known else DASH
                for known in metrics.values()
            ),
            *(_faster(known) for known in metrics.values()),
        ]
        for compared in results.comparisons
        if (metrics := compared.paired) and any(metrics.values())
    ]
    if not rows:
        return []
    columns = ["arm", "against", "requests"]
    columns += [f"mean {title}, %" for title in TITLES.values()]
    columns += [f"{title} shorter, % of requests" for title in TITLES.values()]
    note = (
        "In each repeat all arms get the same sessions in the same order, and each "
        "request is compared with itself. Intervals (95 %) are over sessions and "
        "repeats."
    )
    return [Table(title="Request by request", note=note, columns=columns, rows=rows)]


def _faster(known: Paired | None) -> str:
    if known is None:
        return DASH
    text, ci95 = f"{known.faster.value:.0f}", known.faster.ci95
    return text if ci95 is None else f"{text} [{ci95[0]:.0f}, {ci95[1]:.0f}]"


def _shown_warnings(results: FleetAnalysis) -> Iterable[RunWarning]:
    """Yield the warnings of the first few messages of each kind, and count the rest."""
    messages: dict[str, list[str]] = {}
    remedies: dict[str, str] = {}
    for entry in results.warnings:
        remedies[entry.kind] = entry.remedy
        seen = messages.setdefault(entry.kind, [])
        if entry.message not in seen:
            seen.append(entry.message)
        if entry.message in seen[:SHOWN_MESSAGES]:
            yield entry.warning()
    for kind, seen in messages.items():
        if (more := len(seen) - SHOWN_MESSAGES) > 0:
            message = f"and {more} more in analysis.json"
            yield RunWarning(kind, "", message, remedies[kind])


def _provenance(results: FleetAnalysis) -> Words:
    """List load, fleet and versions, so that the run can be repeated."""
    made = results.made
    trace, versions = made.trace, made.versions
    facts = {
        "command": versions.get("command_line"),
        "commit": versions.get("git_commit"),
        "vLLM": versions.get("vllm_version"),
        "cores": versions.get("cpu_count"),
        "CPU": versions.get("cpu_model"),
        "GPU": versions.get("gpu_model"),
        "trace": trace.get("source") or trace.get("file"),
        "SHA-256 of the replayed trace": trace.get("sha256"),
        "sessions": trace.get("sessions"),
        "requests": trace.get("requests"),
        "instances": made.instances,
        "open loop": made.open_loop,
        "time scale": made.time_scale,
        "simulated forward, times": made.time_factor,
        "virtual time": made.virtual or None,
    }
    items = [f"- {name}: `{fact}`" for name, fact in facts.items() if fact is not None]
    return Words(title="How this was made", paragraphs=items)
