# SPDX-License-Identifier: Apache-2.0
"""What a config adds to a step and to TPOT, and what is noise."""

from __future__ import annotations

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import DASH, interval, number
from microbench.analysis.metrics import METRICS
from microbench.summary.figures import PARTS
from page.document import Table


def attribution(document: PerConfig) -> Table:
    """Parts of a step at the stated |cache|, which sum to the step."""
    rows = []
    for name, entry in document.configs.items():
        parts = entry.attribution_us
        if parts:
            cells = [number(parts[part]) for part in (*PARTS, "step")]
            rows.append([name, *cells])
    note = (
        "µs, means over the middle half of the steps by step time, so that the parts "
        "sum to the step. A dash counts as zero. other is time in the engine core "
        "between the parts."
    )
    head = ["config", *PARTS, "step"]
    return Table(title="Where a step's time goes", note=note, columns=head, rows=rows)


def reconciliation(document: PerConfig, baseline: str | None) -> Table | None:
    """Predicted additions to TPOT for some forward times, and the measured one.

    None without a baseline and another config.
    """
    rows = []
    for name, entry in document.configs.items():
        added = entry.tpot_addition
        if not added:
            continue
        row = [name]
        for modes in added["forward_ms"].values():
            for mode in ("sync", "async"):
                percent = modes[mode]["percent"]
                row.append(
                    f"{modes[mode]['ms']:+.3f} ms"
                    + ("" if percent is None else f" ({percent:+.1f} %)")
                )
        row.append(_measured_ms(document.configs[baseline], entry))
        rows.append((list(added["forward_ms"]), row))
    if not rows:
        return None
    head = ["config"]
    for forward in rows[0][0]:
        head += [f"forward {forward} ms, sync", f"{forward} ms, async"]
    head.append("measured TPOT ms p50/p90")
    # vLLM's CPU platform turns async scheduling off.
    cpu = document.profile.get("null_model")
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


def _measured_ms(baseline: ConfigEntry, entry: ConfigEntry) -> str:
    """By how much TPOT differs from the baseline's, p50 and p90."""
    plateau = entry.tpot_addition["measured_phase"] == "plateau"
    before, after = (
        one.tpot_plateau_ms if plateau else one.tpot_ms for one in (baseline, entry)
    )
    if before is None or after is None:
        return DASH
    return "/".join(f"{after[q] - before[q]:+.3f}" for q in ("p50", "p90"))


def noise_floor(document: PerConfig) -> Table | None:
    """The A/A pair, and which configs do not differ from the baseline; None without."""
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
        if difference["within_noise"]
    ]
    note = f"{baseline} and {twin} are the same thing run twice. "
    if within:
        note += f"Within noise of {baseline} in p50: {', '.join(within)}."
    else:
        note += f"In p50, every other config differs from {baseline} by more."
    head = ["A/A difference", "slope µs/1k", "p50 µs"]
    return Table(title="Noise floor", note=note, columns=head, rows=rows)
