# SPDX-License-Identifier: Apache-2.0
"""May two arms be compared? Only if nothing but what they are about differs.

The reference study first reported -44 % E2E, because its baseline had found warm
caches. So an arm must have begun cold, both must have served the same tokens with the
same failures, sent in time, on a machine that kept up; else there is no number, but the
reasons why.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtax.records.requests import ReplayedRequest

from kvtax_fleet.analyze.arm_runs import ArmRun

# A kind of kvtax_fleet.analyze.fleet_warnings, and what was seen.
Fault = tuple[str, str]
# Must be the same in both; where the sha256 of the trace is, so are the requests.
CONDITIONS = ("concurrency", "open_loop", "time_scale", "time_factor", "virtual")


def refusals(runs: list[ArmRun], arm: str, baseline: str) -> list[str]:
    """List the reasons not to compare `arm` with `baseline`.

    `runs` are all of the experiment's, every repeat of both among them.
    """
    ours = [run for run in runs if run.info.arm == arm]
    theirs = [run for run in runs if run.info.arm == baseline]
    if not ours or not theirs:
        return [f"there is no run of {arm if not ours else baseline}"]
    reasons = [
        f"{run.info.arm} r{run.info.repeat}: {message}"
        for run in ours + theirs
        for _, message in faults(run)
    ]
    if {run.info.repeat for run in ours} != {run.info.repeat for run in theirs}:
        reasons.append("the repeats are not the same in both")
    for name in CONDITIONS:
        values = {getattr(run.info, name) for run in ours + theirs}
        if len(values) > 1:
            reasons.append(f"{name} differs: {_listed(values)}")
    traces = {run.info.trace and run.info.trace.sha256 for run in ours + theirs}
    if len(traces) > 1:
        reasons.append("they replayed different traces")
    # Totals are worth a look only if the runs were whole.
    return reasons or _totals(ours + theirs)


def faults(run: ArmRun) -> Iterator[Fault]:
    """Yield what makes one run by itself unfit for any comparison."""
    info = run.info
    if info.status != "ok":
        error = (info.error or info.status).partition("\n")[0]
        yield "arm_failed", f"the run failed: {error}"
        return
    if info.freshness is None:
        yield "not_fresh", "there is no evidence that it began with cold caches"
    elif not info.freshness.fresh:
        yield "not_fresh", f"it did not begin with cold caches: {info.freshness.why}"
    if warm := found_warm(run.requests):
        yield "not_fresh", f"it did not begin with cold caches: {warm}"
    if info.machine and info.machine.saturated:
        what = f"the machine did not keep up: {info.machine.saturated}"
        yield "machine_saturated", what
    if run.end is None:
        yield "replay_unfinished", "replay.jsonl has no end: the replayer was killed"
    elif not run.end.valid:
        late_ms, budget_ms = (run.end.lag_ms or {}).get("p99"), run.end.lag_budget_ms
        yield "lag", f"requests were sent late: p99 {late_ms} ms, budget {budget_ms} ms"


def found_warm(requests: list[ReplayedRequest]) -> str | None:
    """Name the instances that found tokens cached before any could be; None if none.

    Until the first token of the run, no request has left anything in a cache. So of
    those sent to one instance before that moment, the one that came first found
    nothing, whichever it was: but for offloaded ones, which find what was computed for
    them. vLLM leaves the count out of its usage where it is 0.
    """
    begun_ns = min(
        (
            request.first_token_ns
            for request in requests
            if request.first_token_ns is not None
        ),
        default=0,
    )
    cached_at: dict[str, list[int]] = {}
    for request in requests:
        early = request.sent_ns is not None and request.sent_ns < begun_ns
        if early and request.instance and request.prefill_instance is None:
            cached_at.setdefault(request.instance, []).append(
                request.cached_tokens or 0
            )
    warm = [
        f"the first request to {name} found {min(cached):,} tokens cached"
        for name, cached in cached_at.items()
        if min(cached) > 0
    ]
    return "; ".join(warm) or None


def _totals(runs: list[ArmRun]) -> list[str]:
    sums = {
        "requests": lambda request: 1,
        "requests that did not end ok": lambda request: request.status != "ok",
        "prompt tokens asked for": lambda request: request.input_tokens or 0,
        "answer tokens asked for": lambda request: request.output_tokens or 0,
        "prompt tokens in the servers' usage": lambda request: (
            request.usage_prompt_tokens or 0
        ),
        "answer tokens in the servers' usage": (
            lambda request: request.usage_completion_tokens or 0
        ),
    }
    reasons = []
    for what, value in sums.items():
        totals = {
            f"{run.info.arm} r{run.info.repeat}": sum(map(value, run.requests))
            for run in runs
        }
        if len(set(totals.values())) > 1:
            each = ", ".join(f"{total:,} in {name}" for name, total in totals.items())
            reasons.append(f"{what} differ: {each}")
    return reasons


def _listed(values: set[object]) -> str:
    return ", ".join(sorted(map(str, values)))
