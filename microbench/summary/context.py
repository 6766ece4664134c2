# SPDX-License-Identifier: Apache-2.0
"""The parts of SUMMARY.md about the run itself: machine, provenance, doubts."""

from __future__ import annotations

from collections.abc import Mapping

from lab.records.per_config import ConfigEntry, PerConfig
from lab.records.warning import RunWarning
from lab.stats.markdown import DASH, interval, number, spread, table
from microbench.analysis.roles import Roles
from microbench.summary.figures import CURVES

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
    """What kind of model the run used, so that nobody takes it for another."""
    profile = document.profile
    if not profile.get("null_model"):
        return f"Profile `{profile.get('name')}`, a real model."
    forward = float(profile.get("forward_us") or 0)
    slept = f"a sleep of {forward:g} µs" if forward else "no time at all"
    return (
        f"Profile `{profile.get('name')}`: vLLM without a GPU, on a **null model** "
        f"whose forward returns zeros and takes {slept}. Engine, scheduler, block pool "
        "and connectors are the real ones; times are CPU times of this host."
    )


def reference(document: PerConfig, roles: Roles) -> str:
    """The reference study's numbers beside this run's; never mixed."""
    rows = []
    for name, role in roles.of.items():
        if told := role.reference:
            slope, p50 = told.schedule_slope_us_per_1k_blocks, told.schedule_p50_us
            finished = told.get_finished_us
            rows += [
                [
                    f"{roles.label(name)}, reference",
                    f"{slope:+.1f}",
                    number(p50, 0),
                    number(told.build_meta_p50_us, 0),
                    "/".join(number(us, 0) for us in finished) if finished else DASH,
                ],
                [f"`{name}`, this run", *_ours(document.configs[name])],
            ]
    if not rows:
        return ""
    head = ["", "schedule slope µs/1k", "schedule p50 µs", "build_meta p50 µs"]
    cpu = document.provenance.get("cpu_model") or "an unnamed CPU"
    at = document.window and document.window.at_cache_blocks
    null = document.profile.get("null_model")
    note = (
        "Reference: H20 96 GB, a real 30B model, levels at 16,600 cached blocks. This "
        f"run: {cpu}, {'null model, no GPU' if null else 'a real model'}, levels at "
        f"{number(at, 0)} cached blocks. Another machine and another load: compare "
        "ratios and signs, not µs."
    )
    text = table([*head, "get_finished µs p50/p90/p99"], rows)
    return f"## Beside the reference study\n\n{text}\n\n{note}"


def _ours(entry: ConfigEntry) -> list[str]:
    """This run's cells of a row of `reference`."""
    if entry.verdict == "failed":
        return [DASH] * 4
    return [
        interval(entry.slope_us_per_1k_blocks["schedule"]),
        number((entry.schedule_us or {}).get("p50")),
        number((entry.build_meta_us or {}).get("p50")),
        spread(entry.get_finished_us),
    ]


def figure_list(figures: list[str]) -> str:
    """The figures, each with its data."""
    titles = {name: label for name, (_, label) in CURVES.items()}
    titles["attribution"] = "parts of a step at the stated |cache|"
    return "\n\n".join(
        f"![{titles[name]}](figures/{name}.png)\n\nData: "
        f"[figures/{name}.csv](figures/{name}.csv)"
        for name in figures
    )


def provenance(document: PerConfig) -> str:
    """Command, versions, machine, patches, and the account of requests."""
    facts = document.provenance
    lines = [f"- run: `{facts.get('command_line')}`"]
    lines.append("- report: `python -m microbench.report RUN_DIR`")
    for key in FACTS:
        if facts.get(key) is not None:
            lines.append(f"- {key}: {facts[key]}")
    for title in ("cgroup_limits", "patch_hashes", "package_versions"):
        if facts.get(title):
            listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
            lines.append(f"- {title}: {listed}")
    rows = []
    for name, entry in document.configs.items():
        counts, records, lag = entry.requests, entry.records, entry.lag_ms
        rows.append(
            [f"`{name}`", str(entry.n_repeats)]
            + [str(counts[k]) for k in ("scheduled", "ok", "failed", "cancelled")]
            + [f"{records['engine_steps']:,}", str(records["engine_without_worker"])]
            + [str(records["torn_lines"]), number((lag or {}).get("p99"), 2)]
            + [spread(entry.ttft_ms), spread(entry.tpot_ms, 3)]
        )
    head = ["config", "repeats", "scheduled", "ok", "failed", "cancelled"]
    head += ["engine steps", "without worker record", "torn lines", "send lag p99 ms"]
    head += ["TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99"]
    return "\n".join(lines) + "\n\n" + table(head, rows)


def warnings(
    doubts: Mapping[str | None, list[RunWarning]], configs: Mapping[str, ConfigEntry]
) -> str:
    """What the run suspects of itself, by kind, each with what to do about it.

    `doubts` are by config, those of the run under None.
    """
    kinds: dict[str, list[str]] = {}
    remedies = {}
    for name, found in doubts.items():
        for doubt in found:
            where = f"`{name}`: " if name else ""
            kinds.setdefault(doubt.kind, []).append(f"  - {where}{doubt.message}")
            remedies[doubt.kind] = doubt.remedy
    lines = [
        f"- `{name}` failed: {entry.error}"
        for name, entry in configs.items()
        if entry.verdict == "failed"
    ]
    for kind, messages in kinds.items():
        lines += [f"- **{kind.replace('_', ' ')}**", *messages]
        lines.append(f"  - **What to do:** {remedies[kind]}")
    return "\n".join(lines) or "None."
