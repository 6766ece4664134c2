# SPDX-License-Identifier: Apache-2.0
"""The fixes: what they leave of a connector's cost, and whether aims are met."""

from __future__ import annotations

from collections.abc import Mapping

from kvtax.records.per_config import ConfigEntry, PerConfig
from kvtax.records.run import AimOfConfig
from kvtax.report.document import Section, Table
from kvtax.report.markdown import DASH, TIMES, interval, spread
from kvtax.stats import Estimate
from kvtax.verdict.aims import Aim, judge
from kvtax.verdict.roles import Roles

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
