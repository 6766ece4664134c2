# SPDX-License-Identifier: Apache-2.0
"""The parts of SUMMARY.md about growth: which configs grow with |cache|, and how."""

from __future__ import annotations

from lab.records.per_config import ConfigEntry, PerConfig
from lab.stats.markdown import DASH, interval, number, spread, table
from microbench.analysis.metrics import (
    LEVELS,
    MARGIN_US_PER_1K_BLOCKS,
    METRICS,
    PARTS,
)
from microbench.analysis.roles import Roles
from microbench.analysis.verdict import (
    AGREEING_SHARE,
    LINEAR_R2,
)


def answer(document: PerConfig) -> str:
    """One paragraph: which configs grow and by how much, which do not."""
    configs = document.configs
    by_verdict: dict[str, list[str]] = {}
    for name, entry in configs.items():
        by_verdict.setdefault(entry.verdict, []).append(name)
    parts = []
    parts += [_growth(name, configs[name]) for name in by_verdict.get("grows", [])]
    said = {
        "flat": "do not grow with |cache|: of all that the connector can change, the "
        "95 % interval excludes that the full cache costs more than the empty one by "
        f"{MARGIN_US_PER_1K_BLOCKS:g} µs per 1,000 blocks",
        "drifts": "drift: the cost rises but does not fall at the reset, so it is "
        "something other than |cache|",
        "inconclusive": "stay undecided in this run",
        "failed": "failed and have no numbers",
    }
    for verdict, text in said.items():
        if names := by_verdict.get(verdict):
            listed = ", ".join(f"`{name}`{_split(configs[name])}" for name in names)
            parts.append(f"{listed} {text}.")
    return " ".join(parts)


def _growth(name: str, entry: ConfigEntry) -> str:
    """A sentence on what grows of a config that grows."""
    growing = [m for m, verdict in entry.verdict_of.items() if verdict == "grows"]
    slope = interval(entry.slope_us_per_1k_blocks[growing[0]])
    text = f"`{name}` **grows with |cache|**: {slope} µs per 1,000 cached blocks in "
    text += f"`{growing[0]}`"
    level = entry.level_us(growing[0]) if growing[0] in LEVELS else None
    if level:
        text += f", p50 {number(level['p50'])} µs at {level['at_cache_blocks']:,}"
    return text + ", and the cost falls when the prefix cache is reset."


def config_table(document: PerConfig) -> str:
    """One row per config."""
    rows = []
    for name, entry in document.configs.items():
        blocks, slopes = entry.cache_blocks, entry.slope_us_per_1k_blocks
        step, overhead = entry.step_us or {}, entry.overhead_us or {}
        rows.append(
            [
                f"`{name}`",
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
                f"**{entry.verdict}**{_split(entry)}",
            ]
        )
    head = ["config", "decode-only steps", "\\|cache\\| blocks"]
    head += ["schedule µs p50/p90/p99", "schedule slope µs/1k"]
    head += ["overhead µs p50/p90", "overhead slope µs/1k"]
    head += ["step µs p50/p90", "step slope µs/1k"]
    head += ["build_meta µs", "get_finished µs", "verdict"]
    window = document.window
    note = "No level could be stated: see the warnings."
    if window:
        mix = ", ".join(f"{b}: {s:.0%}" for b, s in window.batch_mix.items())
        note = (
            f"Times are at {window.at_cache_blocks:,} cached blocks (±5 %), the "
            "highest |cache| that all configs reached, with every config weighted to "
            f"the same mix of batch sizes ({mix}). Slopes are those of medians in the "
            "growth phases, within one server and one batch size. `schedule` contains "
            "`build_meta`; `overhead` is schedule, update and the connector's calls in "
            "the worker; `step` contains everything, the model too. The verdict rests "
            "on more: see the reset check. A dash: not measured or not there."
        )
    return table(head, rows) + "\n\n" + note


def _split(entry: ConfigEntry) -> str:
    """What keeps a config from a verdict."""
    if entry.verdict != "inconclusive":
        return ""
    of = {name: told for name, told in entry.verdict_of.items() if name in PARTS}
    undecided = [name for name, told in of.items() if told != "flat"]
    return f" (`{'`, `'.join(undecided)}`)" if undecided else " (the step grows)"


def hypothesis(document: PerConfig, roles: Roles, name: str) -> str:
    """A section with the verdict on: the cost of config `name` is linear in |cache|."""
    title = f"## {roles.label(name)}: is its cost linear in |cache|?\n\n"
    return title + _hypothesis(name, document.configs[name])


def _hypothesis(name: str, entry: ConfigEntry) -> str:
    if entry.verdict == "failed":
        return f"Not tested: `{name}` failed ({entry.error})."
    line = entry.linearity
    slope = interval(entry.slope_us_per_1k_blocks["schedule"])
    verdict = entry.verdict_of["schedule"]
    if verdict != "grows" or line is None:
        return (
            "**Not supported by this run**: the `schedule()` slope of "
            f"`{name}` is {slope} µs per 1,000 blocks, verdict {verdict}."
        )
    lower, upper = line["slope_lower_half"], line["slope_upper_half"]
    shape = "steeper" if upper["value"] > lower["value"] else "flatter"
    said = {
        "yes": "**Supported**: growth is a straight line.",
        "no": f"**Grows, but not in a straight line**: it gets {shape}.",
        "undecided": "**Grows; whether in a straight line is undecided** in this run.",
    }[line["linear"]]
    return (
        f"{said} `schedule()` of `{name}`: {slope} µs per 1,000 blocks; "
        f"{interval(lower)} in the lower half of |cache|, {interval(upper)} in the "
        "upper (alike if they differ by less than a third); a line explains "
        f"{line['r2']:.1%} of the variance of the binned medians (enough: "
        f"{LINEAR_R2:.0%})."
    )


def reset_table(document: PerConfig) -> str:
    """Cost before and after the prefix-cache reset."""
    rows = []
    for name, entry in document.configs.items():
        check = entry.reset_check
        if check is None:
            continue
        for metric in METRICS:
            part = check.get(metric)
            if part is None:
                continue
            rows.append(
                [
                    f"`{name}`",
                    metric,
                    *(number(part[k]) for k in ("before_us", "after_us")),
                    interval(part["fall_us_per_1k_blocks"], 2),
                    interval(entry.slope_us_per_1k_blocks[metric], 2),
                    entry.verdict_of[metric],
                ]
            )
    if not rows:
        return "No config has comparable steps on both sides of a reset."
    head = ["config", "metric", "before µs", "after µs", "fall µs/1k"]
    head += ["slope µs/1k", "verdict"]
    note = (
        "At full cache and just after a prefix-cache reset, batch sizes held. *Grows*: "
        "the fall or the slope is shown to be above the margin, and the other is at "
        f"least {AGREEING_SHARE:.0%} of it."
    )
    return table(head, rows) + "\n\n" + note
