# SPDX-License-Identifier: Apache-2.0
"""Reasons to doubt a fleet run: what was seen, and what to do about it."""

from __future__ import annotations

from typing import Any, Literal

import polars as pl

from fleet.analyze.records import ArmRun
from lab.records.warning import RunWarning

FEW_SESSIONS = 20
TOP_SESSIONS = 5
TOP_SHARE = 0.5
DRAIN_SHARE = 0.2
FAILED_SHARE = 0.01
# Lookups beyond one per request, as a share of the prompt tokens.
MISMATCH_LOOKUPS = 0.01
# Rounding explains no token counts that differ in more than this share of the requests.
MISMATCH_SHARE = 0.001

Kind = Literal[
    "arm_failed",
    "not_fresh",
    "machine_saturated",
    "torn_lines",
    "no_requests",
    "replay_unfinished",
    "lag",
    "held",
    "failures",
    "duplicates",
    "drain",
    "no_window",
    "few_sessions",
    "top_sessions",
    "tokens_disagree",
    "apc_disagrees",
    "no_counters",
    "record_incomplete",
    "uncommitted",
    "aa_differs",
]
_AGAIN = "remove the run's folder and start the experiment with `--out` and `--resume`"
REMEDIES: dict[Kind, str] = {
    "arm_failed": f"Read the error and the logs in the run's folder, then {_AGAIN}.",
    "not_fresh": "Start all instances anew before each arm, and let nobody else use "
    "them; an experiment does both.",
    "machine_saturated": "Raise `time_factor`, lower `concurrency`, or use a machine "
    "with more cores.",
    "torn_lines": f"Find out what killed the writer, then {_AGAIN}.",
    "no_requests": f"Read replay.log, then {_AGAIN}.",
    "replay_unfinished": f"Read replay.log, then {_AGAIN}.",
    "lag": "Stop what else runs on this machine, or lower the load; raise "
    "`lag_budget_ms` only if the latencies are far above it.",
    "held": "Raise `concurrency` until no session waits for a slot, or call the load "
    "what it is: latencies do not hold these waits.",
    "failures": "Look up the reasons under Outcomes and in the instances' logs: the "
    "latencies leave these requests out.",
    "duplicates": "Replay into a new file, with one replayer.",
    "drain": "Replay more sessions, or shorten the longest with `max_turns`.",
    "no_window": "Replay more sessions than are in flight at a time.",
    "few_sessions": "Replay more sessions (`sessions` or `copies` of [workload]).",
    "top_sessions": "Replay more sessions, or shorten the longest with `max_turns`: "
    "these few decide the result.",
    "tokens_disagree": "Use servers that obey `ignore_eos`, `min_tokens` and "
    "`max_tokens`, and that take token ids as they are.",
    "apc_disagrees": "Go by the usage, and make sure that nobody else used the "
    "instances.",
    "no_counters": "Check that the instance serves /metrics and was not restarted "
    "during the run.",
    "record_incomplete": "Analyse with the version that made the run. If it is this "
    "one, the policy uses something that decisions.jsonl does not hold.",
    "uncommitted": "Commit, then run again: nobody can tell what this run measured.",
    "aa_differs": "Take other differences of this size for noise, or add repeats.",
}


class ArmWarning(RunWarning, frozen=True):
    """`arm` and `repeat` are None where it is about more than one."""

    arm: str | None = None
    repeat: int | None = None

    @classmethod
    def of(
        cls,
        kind: Kind,
        message: str,
        arm: str | None = None,
        repeat: int | None = None,
    ) -> ArmWarning:
        return cls(kind, message, REMEDIES[kind], arm, repeat)


def arm_warnings(run: ArmRun, requests: pl.DataFrame) -> list[ArmWarning]:
    """Reasons to doubt one arm in one repeat; `requests` are its own."""
    info, found = run.info, []

    def warn(kind: Kind, message: str) -> None:
        found.append(ArmWarning.of(kind, message, info.arm, info.repeat))

    if info.status != "ok":
        warn("arm_failed", f"it did not finish: {info.error or info.status}")
    if info.freshness is None:
        warn("not_fresh", "no evidence that the instances were fresh")
    elif not info.freshness.fresh:
        warn("not_fresh", f"the instances were not fresh: {info.freshness.why}")
    if info.machine and info.machine.saturated:
        warn("machine_saturated", info.machine.saturated)
    for host in info.hosts:
        if host.machine and host.machine.saturated:
            warn("machine_saturated", f"{host.host}: {host.machine.saturated}")
    if run.torn_lines:
        warn("torn_lines", f"{run.torn_lines} torn last lines were dropped")
    if not run.requests:
        warn("no_requests", "no request in replay.jsonl")
        return found
    if run.end is None:
        warn("replay_unfinished", "replay.jsonl has no end: the replayer was killed")
    elif run.end.valid is False:
        late = (run.end.lag_ms or {}).get("p99")
        warn("lag", f"sent late: p99 {late} ms, budget {run.end.lag_budget_ms} ms")
    if run.end is not None and run.end.held_sessions:
        warn(
            "held",
            f"{run.end.held_sessions} sessions waited for a slot, the longest "
            f"{run.end.held_s_max:.1f} s",
        )
    found += _of_requests(info.arm, info.repeat, requests)
    return found


def _of_requests(arm: str, repeat: int, requests: pl.DataFrame) -> list[ArmWarning]:
    found, n = [], requests.height

    def warn(kind: Kind, message: str) -> None:
        found.append(ArmWarning.of(kind, message, arm, repeat))

    bad = requests.filter(pl.col("status") != "ok").height
    if bad > FAILED_SHARE * n:
        warn("failures", f"{bad} of {n} requests did not end ok")
    twice = n - requests["id"].n_unique()
    if twice:
        warn("duplicates", f"{twice} requests have more than one record")
    drain = requests.filter(pl.col("window") == "drain").height
    if drain > DRAIN_SHARE * n:
        warn("drain", f"{drain / n:.0%} of the requests are in the drain tail")
    if requests["window"].null_count() == n:
        warn("no_window", "no steady window: its numbers are over all requests")
    found += _tokens(arm, repeat, requests.filter(pl.col("status") == "ok"))
    sums = (
        requests.group_by("session")
        .agg((pl.col("input_tokens") + pl.col("output_tokens")).sum().alias("tokens"))
        .sort("tokens", descending=True)["tokens"]
    )
    if len(sums) < FEW_SESSIONS:
        warn("few_sessions", f"{len(sums)} sessions: intervals are rough")
    elif (share := sums[:TOP_SESSIONS].sum() / max(sums.sum(), 1)) > TOP_SHARE:
        warn("top_sessions", f"{TOP_SESSIONS} sessions hold {share:.0%} of the tokens")
    return found


def _tokens(arm: str, repeat: int, ok: pl.DataFrame) -> list[ArmWarning]:
    found = []
    for asked, told, what in (
        ("input_tokens", "usage_prompt_tokens", "prompt"),
        ("output_tokens", "usage_completion_tokens", "generated"),
    ):
        known = ok.filter(pl.col(told).is_not_null())
        apart = known.filter(pl.col(asked) != pl.col(told)).height
        if apart > MISMATCH_SHARE * max(known.height, 1):
            message = (
                f"{apart} of {known.height} requests have other {what} tokens in the "
                "server's usage than were asked for"
            )
            found.append(ArmWarning.of("tokens_disagree", message, arm, repeat))
    return found


def cache_warnings(arm: str, repeat: int, cache: dict[str, Any]) -> list[ArmWarning]:
    """Counters that disagree with the requests' usage, and counters that went back."""
    found = []
    for name, entry in cache["instances"].items():
        if entry["agrees"] is False:
            message = (
                f"{name} counted {entry['hits']:,} hit of {entry['queries']:,} queried "
                f"tokens, its requests were told {entry['cached_tokens']:,} of "
                f"{entry['prompt_tokens']:,}"
            )
            if entry["queries"] > (1 + MISMATCH_LOOKUPS) * entry["prompt_tokens"]:
                message += (
                    ": it looked requests up more than once, as it does while they "
                    "wait for KV blocks; go by the usage"
                )
            found.append(ArmWarning.of("apc_disagrees", message, arm, repeat))
        if entry["queries"] is None:
            message = f"{name}'s counters are missing or went back"
            found.append(ArmWarning.of("no_counters", message, arm, repeat))
    return found


def offline_warnings(arm: str, offline: dict[str, Any] | None) -> list[ArmWarning]:
    """The policy that ran, replayed on its own record, must agree with itself."""
    for name, entry in (offline or {}).items():
        if (
            entry
            and entry["ran"]
            and (entry["other_instance"] or entry["other_prefill"])
        ):
            return [
                ArmWarning.of(
                    "record_incomplete",
                    f"`{name}` decides {entry['other_instance']:.2%} of its own "
                    "recorded snapshots otherwise",
                    arm,
                )
            ]
    return []


def run_warnings(runs: list[ArmRun]) -> list[ArmWarning]:
    """Reasons to doubt all arms alike."""
    if any(run.info.versions.get("git_dirty") for run in runs):
        message = "the run was made from a tree with uncommitted changes"
        return [ArmWarning.of("uncommitted", message)]
    return []


def noise_warnings(compared: list[dict[str, Any]]) -> list[ArmWarning]:
    """An A/A pair that differs beyond its own interval: what else does is doubtful."""
    found = []
    for pair in compared:
        if not pair["same"] or pair["refused"]:
            continue
        known = {
            f"{metric} {quantile}": level["ci95"]
            for metric, levels in pair["percent"].items()
            for quantile, level in levels.items()
            if level and level["ci95"]
        }
        apart = [name for name, (low, high) in known.items() if not low <= 0 <= high]
        if apart:
            message = (
                f"the same as `{pair['baseline']}`, but differs in {len(apart)} of "
                f"{len(known)} (1 in 20 does by chance): {', '.join(apart)}"
            )
            found.append(ArmWarning.of("aa_differs", message, pair["arm"]))
    return found
