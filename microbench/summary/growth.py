# SPDX-License-Identifier: Apache-2.0
"""Which configs grow with |cache|, in words, and how each verdict was reached."""

from __future__ import annotations

from lab.records.per_config import ConfigEntry, NoiseFloor, PerConfig
from lab.stats.markdown import DASH, interval, number, spread
from microbench.analysis.metrics import (
    LEVELS,
    MARGIN_US_PER_1K_BLOCKS,
    METRICS,
    PARTS,
)
from microbench.analysis.roles import Roles
from microbench.analysis.verdict import AGREEING_SHARE, LINEAR_R2
from page.document import Table, Verdict, Verdicts, Words

PER = "µs per 1,000 cached blocks"
# Of one config and of several, what matters most first.
SAID = {
    "grows": ("grows with |cache|", "grow with |cache|"),
    "drifts": ("drifts", "drift"),
    "inconclusive": ("stays undecided", "stay undecided"),
    "failed": ("failed", "failed"),
    "flat": ("does not grow", "do not grow"),
}


def verdicts(document: PerConfig) -> Verdicts:
    """The verdict on each config, in words, with what it rests on."""
    return Verdicts(
        title="Does the cost grow with |cache|?",
        verdicts=[
            Verdict(
                name=name,
                verdict=entry.verdict,
                words=verdict_words(entry),
                reasons=_reasons(entry, document.noise_floor),
            )
            for name, entry in sorted(
                document.configs.items(),
                key=lambda item: list(SAID).index(item[1].verdict),
            )
        ],
    )


def answer(document: PerConfig) -> str:
    """A sentence: which configs grow, and how many do not."""
    told = []
    for verdict, (one, several) in SAID.items():
        names = [n for n, of in document.configs.items() if of.verdict == verdict]
        if names:
            words = one if len(names) == 1 else several
            which = f" ({', '.join(names)})" if verdict != "flat" else ""
            told.append(f"{len(names)} {words}{which}")
    return f"Of {len(document.configs)} configs, {'; '.join(told)}."


def verdict_words(entry: ConfigEntry) -> str:
    """A sentence on what was found of a config, and what its calls take."""
    said = {
        "grows": _growth,
        "flat": lambda _: f"at most {MARGIN_US_PER_1K_BLOCKS:g} {PER}",
        "drifts": lambda _: (
            "the cost rises but does not fall at the reset, so the "
            "reason is something other than |cache|"
        ),
        "inconclusive": _undecided,
        "failed": lambda entry: entry.error or "no trial went well",
    }[entry.verdict](entry)
    if not entry.connector:
        return f"{said}."
    mean = entry.connector["us_per_step"]["mean"]
    return f"{said}. Its calls take {number(mean)} µs per step."


def _growth(entry: ConfigEntry) -> str:
    growing = [m for m, verdict in entry.verdict_of.items() if verdict == "grows"]
    slope = interval(entry.slope_us_per_1k_blocks[growing[0]])
    text = f"{slope} {PER} in {growing[0]}"
    level = entry.level_us(growing[0]) if growing[0] in LEVELS else None
    if level:
        text += (
            f", p50 {number(level['p50'])} µs at {level['at_cache_blocks']:,} blocks"
        )
    return f"{text}; the cost falls when the prefix cache is reset"


def _undecided(entry: ConfigEntry) -> str:
    of = {name: told for name, told in entry.verdict_of.items() if name in PARTS}
    undecided = [name for name, told in of.items() if told != "flat"]
    if not undecided:
        return "the whole step grows, and no part of it does"
    told = []
    for name in undecided:
        fall = (entry.reset_check or {}).get(name)
        known = "not measured"
        if fall:
            known = f"falls by {interval(fall['fall_us_per_1k_blocks'])} {PER}"
        told.append(f"{name} ({known} at a reset)")
    return f"undecided in {', '.join(told)}"


def _reasons(entry: ConfigEntry, noise: NoiseFloor) -> Table | None:
    """Each metric's slope and fall, with what two runs of the same config differ by."""
    rows = []
    for metric in METRICS:
        part = (entry.reset_check or {}).get(metric)
        if metric not in entry.verdict_of:
            continue
        rows.append(
            [
                metric,
                entry.verdict_of[metric],
                interval(entry.slope_us_per_1k_blocks[metric], 2),
                interval(part["fall_us_per_1k_blocks"], 2) if part else DASH,
                number(noise.slope_floor(metric), 2),
                number(noise.fall_floor(metric), 2),
                *(number(part[k]) if part else DASH for k in ("before_us", "after_us")),
            ]
        )
    if not rows:
        return None
    return Table(
        title="How the verdict was reached",
        note="Slope while |cache| grows, fall when the prefix cache is reset, both in "
        f"{PER}; floors: what two runs of the same config differ by. Grows: slope or "
        "fall is above the margin for certain, and the other is at least "
        f"{AGREEING_SHARE:.0%} of it. Before and after: µs around the reset, batch "
        "sizes held.",
        columns=[
            *("metric", "verdict", "slope", "fall"),
            *("slope floor", "fall floor", "before µs", "after µs"),
        ],
        rows=rows,
    )


def level_table(document: PerConfig) -> Table:
    """One row per config: its times at the same |cache|, and their slopes."""
    rows = []
    for name, entry in document.configs.items():
        blocks, slopes = entry.cache_blocks, entry.slope_us_per_1k_blocks
        step, overhead = entry.step_us or {}, entry.overhead_us or {}
        rows.append(
            [
                name,
                f"{entry.n_decode_steps:,}",
                f"{blocks['min']:,}{DASH}{blocks['max']:,}" if blocks else DASH,
                spread(entry.schedule_us),
                interval(slopes["schedule"]),
                f"{number(overhead.get('p50'))}/{number(overhead.get('p90'))}",
                interval(slopes["overhead"]),
                f"{number(step.get('p50'))}/{number(step.get('p90'))}",
                interval(slopes["step"]),
                spread(entry.build_meta_us),
                spread(entry.get_finished_us),
            ]
        )
    head = ["config", "decode-only steps", "|cache| blocks"]
    head += ["schedule µs p50/p90/p99", "schedule slope µs/1k"]
    head += ["overhead µs p50/p90", "overhead slope µs/1k"]
    head += ["step µs p50/p90", "step slope µs/1k"]
    head += ["build_meta µs", "get_finished µs"]
    window = document.window
    note = "No level could be stated: see the warnings."
    if window:
        mix = ", ".join(f"{b}: {s:.0%}" for b, s in window.batch_mix.items())
        note = (
            f"Times are at {window.at_cache_blocks:,} cached blocks (±5 %), the "
            "highest |cache| that all configs reached, with every config weighted to "
            f"the same mix of batch sizes ({mix}). Slopes are those of medians in the "
            "growth phases, within one server and one batch size. schedule contains "
            "build_meta; overhead is schedule, update and the connector's calls in "
            "the worker; step contains everything, the model too. A dash: not "
            "measured or not there."
        )
    return Table(title="Levels and slopes", note=note, columns=head, rows=rows)


def hypothesis(document: PerConfig, roles: Roles, name: str) -> Words:
    """Is the cost of config `name` linear in |cache|?"""
    label = roles.label(name).strip("`")
    said = _hypothesis(name, document.configs[name])
    return Words(title=f"{label}: is its cost linear in |cache|?", paragraphs=[said])


def _hypothesis(name: str, entry: ConfigEntry) -> str:
    if entry.verdict == "failed":
        return f"Not tested: {name} failed ({entry.error})."
    line = entry.linearity
    slope = interval(entry.slope_us_per_1k_blocks["schedule"])
    verdict = entry.verdict_of["schedule"]
    if verdict != "grows" or line is None:
        return (
            f"Not supported by this run: the schedule() slope of {name} is {slope} µs "
            f"per 1,000 blocks, verdict {verdict}."
        )
    lower, upper = line["slope_lower_half"], line["slope_upper_half"]
    shape = "steeper" if upper["value"] > lower["value"] else "flatter"
    said = {
        "yes": "Supported: growth is a straight line.",
        "no": f"Grows, but not in a straight line: it gets {shape}.",
        "undecided": "Grows; whether in a straight line is undecided in this run.",
    }[line["linear"]]
    return (
        f"{said} schedule() of {name}: {slope} µs per 1,000 blocks; "
        f"{interval(lower)} in the lower half of |cache|, {interval(upper)} in the "
        "upper (alike if they differ by less than a third); a line explains "
        f"{line['r2']:.1%} of the variance of the binned medians (enough: "
        f"{LINEAR_R2:.0%})."
    )
