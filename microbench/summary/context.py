# SPDX-License-Identifier: Apache-2.0
"""The run itself: machine, provenance, doubts."""

from __future__ import annotations

from collections.abc import Mapping

from lab.records.per_config import ConfigEntry, PerConfig
from lab.records.warning import RunWarning
from lab.stats.markdown import DASH, interval, number, spread
from microbench.analysis.roles import Roles
from page.document import Doubt, Table

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
        return f"Profile {profile.get('name')}, a real model."
    forward = float(profile.get("forward_us") or 0)
    slept = f"a sleep of {forward:g} µs" if forward else "no time at all"
    return (
        f"Profile {profile.get('name')}: vLLM without a GPU, on a null model "
        f"whose forward returns zeros and takes {slept}. Engine, scheduler, block pool "
        "and connectors are the real ones; times are CPU times of this host."
    )


def reference(document: PerConfig, roles: Roles) -> Table | None:
    """The reference study's numbers beside this run's; never mixed.

    None without a config that has such numbers.
    """
    rows = []
    for name, role in roles.of.items():
        if told := role.reference:
            slope, p50 = told.schedule_slope_us_per_1k_blocks, told.schedule_p50_us
            finished = told.get_finished_us
            rows += [
                [
                    f"{roles.label(name).strip('`')}, reference",
                    f"{slope:+.1f}",
                    number(p50, 0),
                    number(told.build_meta_p50_us, 0),
                    "/".join(number(us, 0) for us in finished) if finished else DASH,
                ],
                [f"{name}, this run", *_ours(document.configs[name])],
            ]
    if not rows:
        return None
    head = ["whose", "schedule slope µs/1k", "schedule p50 µs", "build_meta p50 µs"]
    cpu = document.provenance.get("cpu_model") or "an unnamed CPU"
    at = document.window and document.window.at_cache_blocks
    null = document.profile.get("null_model")
    note = (
        "Reference: H20 96 GB, a real 30B model, levels at 16,600 cached blocks. This "
        f"run: {cpu}, {'null model, no GPU' if null else 'a real model'}, levels at "
        f"{number(at, 0)} cached blocks. Another machine and another load: compare "
        "ratios and signs, not µs."
    )
    head.append("get_finished µs p50/p90/p99")
    return Table(title="Beside the reference study", note=note, columns=head, rows=rows)


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


def provenance(document: PerConfig) -> Table:
    """Command, versions, machine and patches."""
    facts = document.provenance
    rows = [["run", str(facts.get("command_line"))]]
    rows.append(["report", "python -m microbench.report RUN_DIR"])
    for key in FACTS:
        if facts.get(key) is not None:
            rows.append([key, str(facts[key])])
    for title in ("cgroup_limits", "patch_hashes", "package_versions"):
        if facts.get(title):
            listed = ", ".join(f"{k} {str(v)[:16]}" for k, v in facts[title].items())
            rows.append([title, listed])
    return Table(
        title="How this was made", columns=["what", "is"], rows=rows, open=False
    )


def accounts(document: PerConfig) -> Table:
    """What became of every request and record, and the latencies of users."""
    rows = []
    for name, entry in document.configs.items():
        counts, records, lag = entry.requests, entry.records, entry.lag_ms
        rows.append(
            [name, entry.n_repeats]
            + [counts[k] for k in ("scheduled", "ok", "failed", "cancelled")]
            + [records["engine_steps"], records["engine_without_worker"]]
            + [records["torn_lines"], number((lag or {}).get("p99"), 2)]
            + [spread(entry.ttft_ms), spread(entry.tpot_ms, 3)]
        )
    head = ["config", "repeats", "scheduled", "ok", "failed", "cancelled"]
    head += ["engine steps", "without worker record", "torn lines", "send lag p99 ms"]
    head += ["TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99"]
    return Table(title="Requests and records", columns=head, rows=rows, open=False)


def doubts_of(
    doubts: Mapping[str | None, list[RunWarning]], configs: Mapping[str, ConfigEntry]
) -> list[Doubt]:
    """What the run suspects of itself; `doubts` are by config, the run's under None."""
    found = [
        Doubt(
            where=name,
            message=f"failed: {entry.error}",
            remedy="See the trial's server.log; run_all.sh --resume makes it again",
        )
        for name, entry in configs.items()
        if entry.verdict == "failed"
    ]
    return found + [
        Doubt(where=name or "", message=doubt.message, remedy=doubt.remedy.rstrip("."))
        for name, told in doubts.items()
        for doubt in told
    ]


def warnings(
    doubts: Mapping[str | None, list[RunWarning]], configs: Mapping[str, ConfigEntry]
) -> str:
    """A line of Markdown for each kind of doubt: where, an example, what to do."""
    kinds: dict[str, dict[str, list[str]]] = {}
    remedies = {}
    for name, found in doubts.items():
        for doubt in found:
            where = kinds.setdefault(doubt.kind, {})
            where.setdefault(name or "the run", []).append(doubt.message)
            remedies[doubt.kind] = doubt.remedy
    lines = [
        f"- `{name}` failed: {entry.error}"
        for name, entry in configs.items()
        if entry.verdict == "failed"
    ]
    for kind, where in kinds.items():
        names = ", ".join(f"`{n}`" if n != "the run" else n for n in where)
        first = next(iter(where.values()))[0]
        example = first if len(where) == 1 else f"for example, {first}"
        lines.append(
            f"- **{kind.replace('_', ' ')}** ({names}): {example}. *{remedies[kind]}*"
        )
    return "\n".join(lines) or "None."
