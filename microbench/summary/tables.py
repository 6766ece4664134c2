# SPDX-License-Identifier: Apache-2.0
"""Tables of a sweep: additions to a step and to TPOT, the fixes, the run itself."""

from __future__ import annotations

from collections.abc import Mapping

from kvtax.records.per_config import ConfigEntry, HostEntry, PerConfig, TpotAddition
from kvtax.records.run import AimOfConfig
from kvtax.records.warning import RunWarning, Warn
from kvtax.report.document import Cell, Section, Table
from kvtax.report.markdown import DASH, TIMES, interval, number, spread
from kvtax.stats import Estimate
from kvtax.steps.parts import ATTRIBUTED
from kvtax.verdict.aims import Aim, judge
from kvtax.verdict.metrics import JUDGED
from kvtax.verdict.roles import Roles


def attribution(document: PerConfig) -> Table:
    """Parts of a step at the stated |cache|, which sum to the step."""
    rows = []
    for name, entry in document.configs.items():
        parts = entry.attribution_us
        if parts:
            cells = [number(parts[part]) for part in (*ATTRIBUTED, "step")]
            rows.append([name, *cells])
    note = (
        "µs, means over the middle half of the steps by step time, so that the parts "
        "sum to the step. A dash counts as zero. other is time in the engine core "
        "between the parts."
    )
    head = ["config", *ATTRIBUTED, "step"]
    return Table(title="Where a step's time goes", note=note, columns=head, rows=rows)


def reconciliation(document: PerConfig, baseline: str | None) -> Table | None:
    """Predicted additions to TPOT for some forward times, and the measured one.

    None without a baseline and another config.
    """
    rows = []
    for name, entry in document.configs.items():
        added = entry.tpot_addition
        if added is None or baseline is None:
            continue
        row = [name]
        for modes in added.forward_ms.values():
            for mode in (modes["sync"], modes["async"]):
                known = mode.percent is not None
                percent = f" ({mode.percent:+.1f} %)" if known else ""
                row.append(f"{mode.ms:+.3f} ms{percent}")
        row.append(_measured_ms(document.configs[baseline], entry, added))
        rows.append((list(added.forward_ms), row))
    if not rows:
        return None
    head = ["config"]
    for forward in rows[0][0]:
        head += [f"forward {forward} ms, sync", f"{forward} ms, async"]
    head.append("measured TPOT ms p50/p90")
    # vLLM's CPU platform turns async scheduling off.
    cpu = document.profile.null_model
    notes = [
        f"Predicted from the parts of a step against {baseline} at the stated "
        "|cache|. Sync: the addition counts in full. Async: a token takes the longer "
        "of scheduler side and worker side plus forward, so cost on the scheduler side "
        "hides until it exceeds the forward. The first forward time is the run's own. "
        "Compare the measured difference of TPOT p50 (of the plateau phase where there "
        f"is one) with its {'sync column' if cpu else 'column of the scheduling used'}."
        " "
        "Steps that also prefill are longer, so the percentages are upper bounds."
    ]
    fill = document.window and document.window.requests_to_fill
    if fill:
        said = ", ".join(f"{number(n)} at APC {float(a):.0%}" for a, n in fill.items())
        notes.append(
            "The addition in ms does not depend on the APC; the APC sets how soon the "
            f"cache is that full: after {said} requests of this run's median prompt."
        )
    return Table(
        title="What it adds to TPOT",
        note=" ".join(notes),
        columns=head,
        rows=[row for _, row in rows],
    )


def _measured_ms(baseline: ConfigEntry, entry: ConfigEntry, added: TpotAddition) -> str:
    """Format the difference of TPOT from the baseline's, p50 and p90."""
    plateau = added.measured_phase == "plateau"
    before, after = (
        one.tpot_plateau_ms if plateau else one.tpot_ms for one in (baseline, entry)
    )
    if before is None or after is None:
        return DASH
    return "/".join(f"{after[q] - before[q]:+.3f}" for q in ("p50", "p90"))


def noise_floor(document: PerConfig) -> Table | None:
    """Tabulate the A/A pair and the configs within its noise; None without a pair."""
    noise = document.noise_floor
    if noise.pair is None:
        return None
    baseline, twin = noise.pair
    rows = []
    for metric in JUDGED:
        slope = (noise.slope_us_per_1k_blocks or {}).get(metric)
        level = (noise.p50_us or {}).get(metric)
        rows.append([metric, interval(slope, 2), interval(level, 2)])
    within = [
        f"{name} ({metric})"
        for name, entry in document.configs.items()
        if entry.vs_plain
        for metric, difference in entry.vs_plain.items()
        if difference.within_noise
    ]
    note = f"{baseline} and {twin} are the same thing run twice. "
    if within:
        note += f"Within noise of {baseline} in p50: {', '.join(within)}."
    else:
        note += f"In p50, every other config differs from {baseline} by more."
    head = ["A/A difference", "slope µs/1k", "p50 µs"]
    return Table(title="Noise floor", note=note, columns=head, rows=rows)


# Parts that take less per step (us) are only in per_config.json.
LEAST_US = 1.0


def parts_table(document: PerConfig) -> Table:
    """Tabulate the costliest methods, and threads of the engine's process."""
    rows = []
    for name, entry in document.configs.items():
        for kind in ("methods", "threads"):
            for part, told in (getattr(entry, kind) or {}).items():
                if told.us_per_step >= LEAST_US:
                    rows.append(
                        [
                            name,
                            part if kind == "methods" else f"thread {part}",
                            number(told.calls_per_step, 2),
                            number(told.us_per_step),
                            interval(told.slope_per_1k_blocks, 2),
                        ]
                    )
    head = ["config", "method or thread", "calls per step", "µs per step"]
    note = (
        "Means over the steps of the holds; of a method without the connector's "
        "methods that it calls, of a thread its CPU time. Parts below "
        f"{LEAST_US:g} µs are only in per_config.json."
    )
    return Table(
        title="Method by method, thread by thread",
        note=note,
        columns=[*head, "slope per 1k blocks"],
        rows=rows,
        open=False,
    )


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


def model_note(document: PerConfig) -> str:
    """Describe the profile and the kind of model."""
    profile = document.profile
    if not profile.null_model:
        return f"Profile {profile.name}, a real model."
    forward_us = profile.forward_us
    slept = f"a sleep of {forward_us:g} µs" if forward_us else "no time at all"
    return (
        f"Profile {profile.name}: vLLM without a GPU, on a null model "
        f"whose forward returns zeros and takes {slept}. Engine, scheduler, block pool "
        "and connectors are the real ones; times are CPU times of this host."
    )


def provenance(document: PerConfig) -> Table:
    """Command, versions, machine and patches."""
    facts = document.provenance
    rows = [["run", str(facts.get("command_line"))]]
    rows.append(["report", "kvtax sweep --report RUN"])
    for key in FACTS:
        if facts.get(key) is not None:
            rows.append([key, str(facts[key])])
    for title in ("cgroup_limits", "patch_hashes", "package_versions"):
        if facts.get(title):
            listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
            rows.append([title, listed])
    return Table(
        title="How this was made",
        note=model_note(document),
        columns=["what", "is"],
        rows=rows,
        open=False,
    )


def accounts(document: PerConfig) -> Table:
    """Tabulate the counts of requests and records, and the latencies."""
    rows: list[list[Cell]] = []
    for name, entry in document.configs.items():
        counts, records, lag = entry.requests, entry.records, entry.lag_ms
        rows.append(
            [
                *(name, entry.n_repeats),
                *(counts[k] for k in ("scheduled", "ok", "failed", "cancelled")),
                *(records["engine_steps"], records["engine_without_worker"]),
                *(records["torn_lines"], number((lag or {}).get("p99"), 2)),
                *(spread(entry.ttft_ms), spread(entry.tpot_ms, 3)),
            ]
        )
    head = ["config", "repeats", "scheduled", "ok", "failed", "cancelled"]
    head += ["engine steps", "without worker record", "torn lines", "send lag p99 ms"]
    head += ["TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99"]
    return Table(title="Requests and records", columns=head, rows=rows, open=False)


def warnings_of(
    warnings: Mapping[str | None, list[RunWarning]], configs: Mapping[str, ConfigEntry]
) -> list[RunWarning]:
    """List all warnings; `warnings` are by config, the run's under None."""
    found = [
        Warn.TRIAL_FAILED(name, error=entry.error)
        for name, entry in configs.items()
        if entry.verdict == "failed"
    ]
    return found + [
        warning.within(name or "") for name, of in warnings.items() for warning in of
    ]


NOTE = (
    "Each host measured all configs in each of its repeats. `schedule()` and step: p50 "
    "in µs at the stated |cache|."
)


def hosts(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate the hosts; None for a run on one machine."""
    if not document.hosts:
        return None
    shown = [name for name in (roles.baseline, roles.twin) if name in document.configs]
    head = ["host", "CPU", "repeats", "servers", "failed", "send lag p99, ms"]
    head += [f"{name}: {time}" for name in shown for time in ("schedule", "step")]
    rows = [
        [name, *_facts(one), *_levels(one, shown)]
        for name, one in document.hosts.items()
    ]
    return Table(title="Hosts", note=NOTE, columns=head, rows=rows)


def _facts(one: HostEntry) -> list[str]:
    return [
        one.cpu_model or DASH,
        ", ".join(map(str, one.repeats)),
        str(one.servers),
        str(one.servers - one.servers_that_count),
        number(one.send_lag_p99_ms, 2),
    ]


def _levels(one: HostEntry, shown: list[str]) -> list[str]:
    return [
        number(one.p50_us.get(name, {}).get(time))
        for name in shown
        for time in ("schedule", "step")
    ]


# The reference study states steps and TPOT at p90.
P50_AND_P90 = ("p50", "p90")


def before_and_after(document: PerConfig, roles: Roles) -> list[Section]:
    """From the floor to all fixes, and whether the aims are met.

    Empty unless the run has the floor and a config with an aim.
    """
    configs, floor = document.configs, roles.floor
    present = [n for n in roles.before_after if configs[n].verdict != "failed"]
    if floor not in present or not any(roles.of[name].aims for name in present):
        return []
    rows = [_row(name, configs[name]) for name in present]
    ratio = f"p50 {TIMES} {floor}"
    head = ["config", "schedule µs p50/p90", ratio, "schedule slope µs/1k"]
    head += ["build_meta µs p50/p90", "get_finished µs p50/p90/p99"]
    head += ["overhead µs p50/p90", ratio, "step µs p50/p90", ratio]
    head += ["TPOT ms p50/p90"]
    reads = [told for name in present for told in _reads(name, configs[name])]
    title = "Before and after the fixes"
    made = Table(title=title, note=" ".join(reads), columns=head, rows=rows)
    return [made, _aims(present, configs, roles)]


def _row(name: str, entry: ConfigEntry) -> list[str]:
    against = entry.vs_noop or {}
    cells = [name]
    for metric in ("schedule", "overhead", "step"):
        level = spread(entry.level_us(metric), names=P50_AND_P90)
        cells += [level, _ratio(against.get(metric))]
        if metric == "schedule":
            cells.append(interval(entry.slope_us_per_1k_blocks["schedule"]))
            cells.append(spread(entry.build_meta_us, names=P50_AND_P90))
            cells.append(spread(entry.get_finished_us))
    return [*cells, spread(entry.tpot_ms, 3, P50_AND_P90)]


def _ratio(ratio: Estimate | None) -> str:
    return f"{ratio:.3f}" if ratio and ratio.ci95 else DASH


def _reads(name: str, entry: ConfigEntry) -> list[str]:
    """Describe the peers' reads in one sentence, empty without reads."""
    reads = entry.reads
    if reads is None:
        return []
    blocks = reads.blocks_offered
    return [
        f"From {name} a peer read {reads.reads:,} prefixes of "
        f"{blocks / reads.reads:.0f} blocks, {reads.reads / reads.seconds:.1f} per "
        f"second; {reads.blocks_valid / blocks:.2%} of the blocks were still valid "
        "when they had arrived."
    ]


def _aims(
    present: list[str], configs: Mapping[str, ConfigEntry], roles: Roles
) -> Table:
    """All aims that were measured, and a line on those that were not."""
    rows, missing = [], []
    for name in present:
        for told in roles.of[name].aims:
            aim, measured = _aim(name, configs[name], told, roles.floor)
            if measured is None or measured.ci95 is None:
                missing.append(str(aim))
            else:
                found, judged = f"{measured:,.3f}", judge(measured, aim)
                rows.append([aim.what, aim.bound, aim.whose, found, judged])
    note = f"Not measured: {'; '.join(missing)}." if missing else ""
    head = ["what", "aim", "whose", "found", "judged"]
    return Table(title="Aims", note=note, columns=head, rows=rows)


def _aim(
    name: str, entry: ConfigEntry, told: AimOfConfig, floor: str | None
) -> tuple[Aim, Estimate | None]:
    """Describe an aim and the measured value."""
    time = f"{told.metric}_us of {name}"
    if told.quantity == "times_floor":
        what, unit = f"p50 of {time}", f"{TIMES} that of {floor}"
        measured = (entry.vs_noop or {}).get(told.metric)
    else:
        what, unit = f"slope of {time}", "µs per 1,000 blocks"
        measured = entry.slope_us_per_1k_blocks[told.metric]
    return Aim(what=what, at_most=told.at_most, unit=unit, whose=told.whose), measured
