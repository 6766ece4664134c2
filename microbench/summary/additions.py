# SPDX-License-Identifier: Apache-2.0
"""Tables of a config's addition to a step and to TPOT, and of the noise floor."""

from __future__ import annotations

from kvtax.records.per_config import ConfigEntry, PerConfig, TpotAddition
from kvtax.report.document import Table
from kvtax.report.markdown import DASH, interval, number
from kvtax.steps.parts import ATTRIBUTED
from kvtax.verdict.metrics import METRICS


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
    for metric in METRICS:
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
