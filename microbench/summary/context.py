# SPDX-License-Identifier: Apache-2.0
"""Tables of the run: machine, provenance, warnings."""

from __future__ import annotations

from collections.abc import Mapping

from kvtax.records.per_config import ConfigEntry, HostEntry, PerConfig
from kvtax.records.warning import RunWarning, Warn
from kvtax.report.document import Cell, Table
from kvtax.report.markdown import DASH, number, spread
from kvtax.verdict.roles import Roles

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
        title="How this was made", columns=["what", "is"], rows=rows, open=False
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
    "Each host measured all configs in each of its repeats. A server is set aside if "
    "it was more than 1.5 times as slow as usual in this run, by work in which no "
    "connector has a part. `schedule()` and step: p50 in µs at the stated |cache|."
)


def hosts(document: PerConfig, roles: Roles) -> Table | None:
    """Tabulate the hosts; None for a run on one machine."""
    if not document.hosts:
        return None
    shown = [name for name in (roles.baseline, roles.twin) if name in document.configs]
    head = ["host", "CPU", "repeats", "servers", "set aside or failed"]
    head += ["times as slow", "send lag p99, ms"]
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
        number(one.times_as_slow, 2),
        number(one.send_lag_p99_ms, 2),
    ]


def _levels(one: HostEntry, shown: list[str]) -> list[str]:
    return [
        number(one.p50_us.get(name, {}).get(time))
        for name in shown
        for time in ("schedule", "step")
    ]
