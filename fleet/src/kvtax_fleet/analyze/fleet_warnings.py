# SPDX-License-Identifier: Apache-2.0
"""Reasons to doubt a fleet run: what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import polars as pl
from kvtax.records.warning import RunWarning

from kvtax_fleet.analyze.arm_runs import ArmRun
from kvtax_fleet.analyze.cache import Apc
from kvtax_fleet.analyze.refusals import Fault, faults

FEW_SESSIONS = 20
TOP_SESSIONS = 5
TOP_SHARE = 0.5
DRAIN_SHARE = 0.2
FAILED_SHARE = 0.01
# Lookups beyond one per request, as a share of the prompt tokens.
MISMATCH_LOOKUPS = 0.01
# Rounding explains no token counts that differ in more than this share of the requests.
MISMATCH_SHARE = 0.001

_AGAIN = "remove the run's folder and start the experiment with `--out` and `--resume`"
REMEDIES = {
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
    "uncommitted": "Commit, then run again: nobody can tell what this run measured.",
}


class WarningEntry(msgspec.Struct):
    """A warning in analysis.json, of an arm and repeat, or of all."""

    kind: str
    """What is doubtful."""
    message: str
    """What was noticed."""
    remedy: str
    """What to do."""
    arm: str | None
    """Null for all arms."""
    repeat: int | None
    """Null for all repeats."""

    def warning(self) -> RunWarning:
        """Convert to the warning of a page; its place is `ARM/REPEAT`."""
        parts = (self.arm, self.repeat)
        place = "/".join(str(part) for part in parts if part is not None)
        return RunWarning(self.kind, place, self.message, self.remedy)


def doubt(
    kind: str, message: str, arm: str | None = None, repeat: int | None = None
) -> WarningEntry:
    """Make a warning of a kind that has a remedy."""
    return WarningEntry(kind, message, REMEDIES[kind], arm, repeat)


def arm_warnings(run: ArmRun, requests: pl.DataFrame) -> list[WarningEntry]:
    """Reasons to doubt one arm in one repeat; `requests` are its own."""
    doubts = [*faults(run), *_of_run(run)]
    if run.requests:
        doubts += [*_of_requests(requests), *_of_tokens(requests)]
    info = run.info
    return [doubt(kind, message, info.arm, info.repeat) for kind, message in doubts]


def _of_run(run: ArmRun) -> Iterator[Fault]:
    if run.torn_lines:
        yield "torn_lines", f"{run.torn_lines} torn last lines were dropped"
    if not run.requests:
        yield "no_requests", "no request in replay.jsonl"
    if run.end is not None and run.end.held_sessions:
        yield (
            "held",
            f"{run.end.held_sessions} sessions waited for a slot, the longest "
            f"{run.end.held_s_max:.1f} s",
        )


def _of_requests(requests: pl.DataFrame) -> Iterator[Fault]:
    n = requests.height
    bad = requests.filter(pl.col("status") != "ok").height
    if bad > FAILED_SHARE * n:
        yield "failures", f"{bad} of {n} requests did not end ok"
    drain = requests.filter(pl.col("window") == "drain").height
    if drain > DRAIN_SHARE * n:
        yield "drain", f"{drain / n:.0%} of the requests are in the drain tail"
    if requests["window"].null_count() == n:
        yield "no_window", "no steady window: its numbers are over all requests"
    sums = (
        requests.group_by("session")
        .agg((pl.col("input_tokens") + pl.col("output_tokens")).sum().alias("tokens"))
        .sort("tokens", descending=True)["tokens"]
    )
    if len(sums) < FEW_SESSIONS:
        yield "few_sessions", f"{len(sums)} sessions: intervals are rough"
    elif (share := _share(sums[:TOP_SESSIONS], sums)) > TOP_SHARE:
        yield "top_sessions", f"{TOP_SESSIONS} sessions hold {share:.0%} of the tokens"


def _share(part: pl.Series, whole: pl.Series) -> float:
    return float(sum(part.to_list()) / max(sum(whole.to_list()), 1))


def _of_tokens(requests: pl.DataFrame) -> Iterator[Fault]:
    ok = requests.filter(pl.col("status") == "ok")
    for requested, counted, what in (
        ("input_tokens", "usage_prompt_tokens", "prompt"),
        ("output_tokens", "usage_completion_tokens", "generated"),
    ):
        known = ok.filter(pl.col(counted).is_not_null())
        apart = known.filter(pl.col(requested) != pl.col(counted)).height
        if apart > MISMATCH_SHARE * max(known.height, 1):
            yield (
                "tokens_disagree",
                f"{apart} of {known.height} requests have other {what} tokens in the "
                "server's usage than were asked for",
            )


def cache_warnings(arm: str, repeat: int, cache: Apc) -> list[WarningEntry]:
    """Warn of counters that disagree with the requests' usage, or went back."""
    doubts = []
    for name, entry in cache.instances.items():
        if entry.agrees is False:
            message = (
                f"{name} counted {entry.hits:,} hit of {entry.queries:,} queried "
                f"tokens, its requests were told {entry.cached_tokens:,} of "
                f"{entry.prompt_tokens:,}"
            )
            most = (1 + MISMATCH_LOOKUPS) * entry.prompt_tokens
            if entry.queries is not None and entry.queries > most:
                message += (
                    ": it looked requests up more than once, as it does while they "
                    "wait for KV blocks; go by the usage"
                )
            doubts.append(doubt("apc_disagrees", message, arm, repeat))
        if entry.queries is None:
            message = f"{name}'s counters are missing or went back"
            doubts.append(doubt("no_counters", message, arm, repeat))
    return doubts


def run_warnings(runs: list[ArmRun]) -> list[WarningEntry]:
    """Reasons to doubt all arms alike."""
    if any(run.info.versions.get("git_dirty") for run in runs):
        message = "the run was made from a tree with uncommitted changes"
        return [doubt("uncommitted", message)]
    return []
