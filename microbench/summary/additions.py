# SPDX-License-Identifier: Apache-2.0
"""The parts of SUMMARY.md about what a config adds to a step and to TPOT; the noise."""

from __future__ import annotations

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import DASH, interval, number, table
from microbench.analysis.metrics import METRICS
from microbench.summary.figures import PARTS


def attribution(document: PerConfig) -> str:
    """Parts of a step at the stated |cache|, which sum to the step."""
    rows = []
    for name, entry in document.configs.items():
        parts = entry.attribution_us
        if parts:
            cells = [number(parts[part]) for part in (*PARTS, "step")]
            rows.append([f"`{name}`", *cells])
    if not rows:
        return "Nothing to attribute."
    note = (
        "µs, means over the middle half of the steps by step time, so that the parts "
        "sum to the step. A dash counts as zero. `other` is time in the engine core "
        "between the parts."
    )
    return table(["config", *PARTS, "step"], rows) + "\n\n" + note


def reconciliation(document: PerConfig, baseline: str | None) -> str:
    """Predicted additions to TPOT for some forward times, and the measured one."""
    rows = []
    for name, entry in document.configs.items():
        added = entry.tpot_addition
        if not added:
            continue
        row = [f"`{name}`"]
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
        return "Needs a baseline and another config in the same run."
    head = ["config"]
    for forward in rows[0][0]:
        head += [f"forward {forward} ms, sync", f"{forward} ms, async"]
    head.append("measured TPOT ms p50/p90")
    # vLLM's CPU platform turns async scheduling off.
    cpu = document.profile.get("null_model")
    notes = [
        f"Predicted from the parts of a step against `{baseline}` at the stated "
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
    return table(head, [row for _, row in rows]) + "\n\n" + "\n\n".join(notes)


def _measured_ms(baseline: ConfigEntry, entry: ConfigEntry) -> str:
    """By how much TPOT differs from the baseline's, p50 and p90."""
    plateau = entry.tpot_addition["measured_phase"] == "plateau"
    before, after = (
        one.tpot_plateau_ms if plateau else one.tpot_ms for one in (baseline, entry)
    )
    if before is None or after is None:
        return DASH
    return "/".join(f"{after[q] - before[q]:+.3f}" for q in ("p50", "p90"))


def noise_floor(document: PerConfig) -> str:
    """The A/A pair, and which configs do not differ from the baseline."""
    noise = document.noise_floor
    if noise.pair is None:
        return "No A/A pair in this run: no noise floor."
    baseline, twin = noise.pair
    rows = []
    for metric in METRICS:
        slope = (noise.slope_us_per_1k_blocks or {}).get(metric)
        level = (noise.p50_us or {}).get(metric)
        rows.append([metric, interval(slope, 2), interval(level, 2)])
    text = table(["A/A difference", "slope µs/1k", "p50 µs"], rows)
    within = [
        f"`{name}` ({metric})"
        for name, entry in document.configs.items()
        if entry.vs_plain
        for metric, difference in entry.vs_plain.items()
        if difference["within_noise"]
    ]
    text += f"\n\n`{baseline}` and `{twin}` are the same thing run twice. "
    if within:
        return text + f"Within noise of `{baseline}` in p50: {', '.join(within)}."
    return text + f"In p50, every other config differs from `{baseline}` by more."
