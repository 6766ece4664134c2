# SPDX-License-Identifier: Apache-2.0
"""Tables of a sweep, for SUMMARY.md and report.html alike."""

from __future__ import annotations

from collections.abc import Mapping

from kvtax.records.estimate import Estimate
from kvtax.records.per_config import HeldLevels, Judged, PerConfig, Share
from kvtax.records.run import ReferenceFigures
from kvtax.records.warning import RunWarning, Warn
from kvtax.report.document import Cell, Table, Verdict, Verdicts
from kvtax.report.markdown import DASH, TIMES, interval, number, spread
from kvtax.steps.parts import ATTRIBUTED
from kvtax.verdict.bounds import Bound, judge
from kvtax.verdict.metrics import METRICS, SCHEDULE
from kvtax.verdict.roles import Roles
from microbench.summary.words import (
    NAMES,
    WORDS,
    expected,
    growing_first,
    long_calls,
)


def costs(document: PerConfig) -> Table:
    """Tabulate the costs of each config, those that grow first."""
    baseline = document.baseline or "the baseline"
    rows = []
    for name in growing_first(document):
        entry = document.configs[name]
        rows.append(
            [
                name,
                WORDS[entry.verdict],
                _percent(entry.over_baseline),
                _percent(entry.full_adds),
                f"{_us(entry.over_baseline)}, {_us(entry.full_adds)}",
                _token(entry),
                long_calls(entry),
            ]
        )
    head = ["config", "verdict", f"costs over {baseline}, %"]
    head += ["a full cache adds, %", "both in µs here"]
    head += ["a full cache adds to a token, µs", "calls over 10 ms"]
    return Table(title="Cost per engine step", columns=head, rows=rows)


def _percent(share: Share | None) -> str:
    return interval(share.percent if share else None)


def _us(share: Share | None) -> str:
    return f"{share.us:+,.0f}" if share else DASH


def _token(entry: Judged) -> str:
    if (adds := entry.tpot_full_adds) is None:
        return DASH
    one_percent = adds.us / adds.percent.value if adds.percent.value else 0.0
    ends = (one_percent * adds.percent.low, one_percent * adds.percent.high)
    return interval(Estimate(adds.us, ends), 0)


# A growth of less, in us per 1,000 blocks, is none on either machine.
NO_GROWTH = 2.0
# Figures that differ by no more than this factor agree: the machines are not alike.
FACTOR = 2.0


def reference(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate the reference study's figures beside ours; None without any."""
    rows = []
    for name, entry in document.configs.items():
        study = roles.of[name].reference
        if study is not None and entry.verdict != "failed":
            rows += [[name, *row] for row in _reference(entry, study)]
    if not rows:
        return None
    note = (
        "The reference study's `step_dur` is our `schedule()`, its `mooncake_both` our "
        "`mooncake_both_hash_sync`. Another machine (H20) and another load: figures "
        f"agree if they are within a factor of {FACTOR:g}, or both show no growth."
    )
    head = ["config", "figure", "here", "study", ""]
    return Table(
        title="The reference study's figures", note=note, columns=head, rows=rows
    )


def _reference(entry: Judged, study: ReferenceFigures) -> list[list[str]]:
    rows = []
    growth = entry.growth_slope_us_per_1k_blocks or entry.slope_us_per_1k_blocks.get(
        SCHEDULE
    )
    theirs = study.schedule_slope_us_per_1k_blocks
    if growth is not None:
        rows.append(_beside("growth, µs per 1,000 blocks", growth.value, theirs))
    if entry.schedule_us:
        ours = entry.schedule_us.p50
        rows.append(_beside("schedule p50, µs", ours, study.schedule_p50_us))
    if entry.schedule_us and entry.build_meta_us and study.build_meta_p50_us:
        ours = 100 * entry.build_meta_us.p50 / entry.schedule_us.p50
        share = 100 * study.build_meta_p50_us / study.schedule_p50_us
        rows.append(_beside("build_meta, % of schedule", ours, share))
    if entry.get_finished_us and study.get_finished_us:
        ours = entry.get_finished_us.p50
        rows.append(_beside("get_finished p50, µs", ours, study.get_finished_us[0]))
    return rows


def _beside(figure: str, here: float, study: float) -> list[str]:
    both_small = max(abs(here), abs(study)) <= NO_GROWTH
    near = here > 0 < study and 1 / FACTOR <= here / study <= FACTOR
    word = "agrees" if near or both_small else "differs"
    return [figure, number(here), number(study), word]


def verdicts(document: PerConfig) -> Verdicts:
    """Build the verdicts of all configs; each opens its holds."""
    return Verdicts(
        title="Verdicts and their holds",
        verdicts=[
            Verdict(
                name=name,
                verdict=document.configs[name].verdict,
                words=_words(document.configs[name]),
                reasons=_levels(document.configs[name]),
            )
            for name in growing_first(document)
        ],
    )


def _words(entry: Judged) -> str:
    if entry.verdict == "failed":
        return f"{entry.error or 'no trial went well'}."
    if entry.full_adds is None:
        return "too few holds to know any level."
    adds = entry.full_adds
    return f"a full cache adds {adds.percent:+.1f} % of own work, {adds.us:+,.0f} µs."


def _levels(entry: Judged) -> Table | None:
    """Tabulate each metric's levels of |cache| in % of own work."""
    if not entry.held:
        return None
    longest = max(entry.held.values(), key=lambda held: len(held.cache_blocks))
    rows: list[list[Cell]] = [
        [
            NAMES.get(name, name),
            entry.verdict_of.get(name, ""),
            *_cells(held, longest.cache_blocks),
            interval(held.full_adds),
            number(held.most),
            held.shape or "",
        ]
        for name, held in entry.held.items()
        if name in METRICS
    ]
    head = ["% of own work", "verdict"]
    head += [f"at {blocks:,} blocks" for blocks in longest.cache_blocks]
    head += ["a full cache adds", "at most", "shape"]
    return Table(title="Held levels", columns=head, rows=rows)


def _cells(held: HeldLevels, blocks: list[int]) -> list[str]:
    """Put the levels of a metric under those of the metric that has most."""
    by_column = [DASH] * len(blocks)
    for at, level in zip(held.cache_blocks, held.levels, strict=True):
        nearest = min(range(len(blocks)), key=lambda n: abs(blocks[n] - at))
        by_column[nearest] = number(level)
    return by_column


def known_verdicts(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate expected and actual verdicts; None if none is expected."""
    known, count = expected(document, roles)
    if not known:
        return None
    rows = [[o.config, o.expected, o.verdict, o.kind] for o in known]
    head = ["config", "must be", "is", "so"]
    return Table(title="Configs of known cost", note=count, columns=head, rows=rows)


def own_limits(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate the limits that configs set themselves; None without any."""
    rows = []
    for name, entry in document.configs.items():
        for limit in roles.of[name].aims:
            if limit.quantity == "times_floor":
                bound = Bound("", limit.at_most, f"{TIMES} {document.floor}")
                ratio = entry.vs_noop.get(limit.metric)
                word = judge(ratio, bound) if ratio else "not measured"
                shown = f"{ratio:.2f}" if ratio else DASH
                rows.append([name, limit.metric, str(bound), shown, word])
    if not rows:
        return None
    head = ["config", "of", "limit", "here", ""]
    title = "Limits that configs set themselves"
    return Table(title=title, columns=head, rows=rows)


# Parts that take less per step (us) are only in per_config.json.
LEAST_US = 1.0


def parts(document: PerConfig) -> Table:
    """Tabulate the costliest methods, and threads of the engine's process."""
    rows = []
    for name, entry in document.configs.items():
        for prefix, of in (("", entry.methods), ("thread ", entry.threads)):
            for part, cost in (of or {}).items():
                if cost.us_per_step >= LEAST_US:
                    held = entry.held.get(f"{prefix}{part}")
                    rows.append(
                        [
                            name,
                            f"{prefix}{part}",
                            number(cost.calls_per_step, 2),
                            number(cost.us_per_step),
                            interval(held.full_adds if held else None),
                        ]
                    )
    head = ["config", "method or thread", "calls per step", "µs per step"]
    note = (
        "Means at the stated |cache|; of a method without the connector's methods that "
        f"it calls, of a thread its CPU time. Parts below {LEAST_US:g} µs are only in "
        "per_config.json."
    )
    return Table(
        title="Method by method, thread by thread",
        note=note,
        columns=[*head, "a full cache adds, %"],
        rows=rows,
        open=False,
    )


def attribution(document: PerConfig) -> Table:
    """Tabulate the parts of a step at the stated |cache|, which sum to the step."""
    rows = [
        [name, *(number(entry.attribution_us[part]) for part in (*ATTRIBUTED, "step"))]
        for name, entry in document.configs.items()
        if entry.attribution_us
    ]
    note = (
        "µs, means over the middle half of the steps by step time, so that the parts "
        "sum to the step. A dash counts as zero. other is time in the engine core "
        "between the parts."
    )
    head = ["config", *ATTRIBUTED, "step"]
    return Table(
        title="Parts of a step", note=note, columns=head, rows=rows, open=False
    )


def requests(document: PerConfig) -> Table:
    """Tabulate the counts of requests and records, and the latencies."""
    rows: list[list[Cell]] = []
    for name, entry in document.configs.items():
        counts, records, lag = entry.requests, entry.records, entry.lag_ms
        rows.append(
            [
                *(name, entry.n_repeats),
                *(counts[k] for k in ("scheduled", "ok", "failed", "cancelled")),
                *(records["engine_steps"], records["engine_without_worker"]),
                *(records["torn_lines"], number(lag.p99 if lag else None, 2)),
                *(spread(entry.ttft_ms), spread(entry.tpot_ms, 3), _idle(entry)),
            ]
        )
    head = ["config", "repeats", "scheduled", "ok", "failed", "cancelled"]
    head += ["engine steps", "without worker record", "torn lines", "send lag p99 ms"]
    head += ["TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "idle: % of a core; MiB"]
    return Table(title="Requests and records", columns=head, rows=rows, open=False)


def _idle(entry: Judged) -> str:
    if not (idle := entry.idle):
        return DASH
    core = number(100 * idle.cpu_s / idle.seconds)
    return f"{core}; {number(entry.pss_mib)}"


def hosts(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate the hosts; None for a run on one machine."""
    if not document.hosts:
        return None
    shown = [name for name in (roles.baseline, roles.twin) if name in document.configs]
    head = ["host", "CPU", "repeats", "servers", "failed", "send lag p99, ms"]
    head += [f"{name}: {time}" for name in shown for time in ("schedule", "step")]
    rows = [
        [
            name,
            host.cpu_model or DASH,
            ", ".join(map(str, host.repeats)),
            str(host.servers),
            str(host.servers - host.servers_that_count),
            number(host.send_lag_p99_ms, 2),
            *(
                number(host.p50_us.get(config, {}).get(time))
                for config in shown
                for time in ("schedule", "step")
            ),
        ]
        for name, host in document.hosts.items()
    ]
    note = (
        "Each host measured all configs in each of its repeats. `schedule()` and step: "
        "p50 in µs at the stated |cache|."
    )
    return Table(title="Hosts", note=note, columns=head, rows=rows)


FACTS = (
    "date_utc",
    "vllm_version",
    "python_version",
    "cpu_model",
    "cpu_count",
    "cpu_affinity",
    "cpu_governor",
    "gpu_model",
    "load_average",
    "hash_seed",
    "kernel",
    "git_commit",
    "git_dirty",
    "report_git_commit",
)


def provenance(document: PerConfig, note: str) -> Table:
    """Tabulate command, versions, machine and patches."""
    facts = document.provenance
    rows = [["run", str(facts.get("command_line"))]]
    rows += [[key, str(facts[key])] for key in FACTS if facts.get(key) is not None]
    for title in ("cgroup_limits", "patch_hashes", "package_versions"):
        if facts.get(title):
            listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
            rows.append([title, listed])
    return Table(
        title="How this was made",
        note=note,
        columns=["what", "is"],
        rows=rows,
        open=False,
    )


def warnings_of(
    warnings: Mapping[str | None, list[RunWarning]], configs: Mapping[str, Judged]
) -> list[RunWarning]:
    """List all warnings; `warnings` are by config, the run's under None."""
    failed = [
        Warn.TRIAL_FAILED(name, error=entry.error)
        for name, entry in configs.items()
        if entry.verdict == "failed"
    ]
    return failed + [
        warning.within(name or "") for name, of in warnings.items() for warning in of
    ]
