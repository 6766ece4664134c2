# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run and its configs."""

from __future__ import annotations

from collections.abc import Collection

from kvtax.records.per_config import Judged, MachineEntry, Measured, NoiseFloor
from kvtax.records.run import RunRecord
from kvtax.records.warning import RunWarning, Warn
from kvtax.verdict.metrics import METRICS
from kvtax.verdict.roles import Roles

# The 99 % quantile of fewer steps is the slowest of them.
FEW_STEPS = 100
MISSING_SHARE = 0.01


def open_metrics(entry: Judged) -> list[str]:
    """List the metrics that keep a config from flat, but those not measured."""
    return [
        name
        for name, metric in METRICS.items()
        if metric.decides and entry.verdict_of.get(name) == "inconclusive"
    ]


def largest_relative_bound(entry: Judged) -> float:
    """Compute the largest bound that keeps a config from flat, by its margin.

    Of configs without a verdict, the one with the least is measured again first.
    """
    return max(
        (
            entry.held[name].most / (100 * METRICS[name].margin)
            for name in open_metrics(entry)
        ),
        default=0.0,
    )


def config_warnings(entry: Judged) -> list[RunWarning]:
    """Warn of doubts about the numbers of one config."""
    undecided = open_metrics(entry) if entry.verdict == "inconclusive" else []
    return [
        *([Warn.TRIALS_FAILED(error=entry.error)] if entry.error else []),
        *_of_estimates(entry, entry.held),
        *_of_records(entry),
        *_of_requests(entry),
        *([Warn.UNDECIDED(metrics=", ".join(undecided))] if undecided else []),
    ]


def _of_estimates(measured: Measured, held: Collection[str]) -> list[RunWarning]:
    warnings = []
    if (steps := measured.n_window_steps) < FEW_STEPS:
        warnings.append(Warn.FEW_STEPS(count=steps, fewest=FEW_STEPS))
    if not held:
        warnings.append(Warn.NO_SLOPE())
    return warnings


def _of_records(measured: Measured) -> list[RunWarning]:
    warnings, records = [], measured.records
    missing, steps = records["engine_without_worker"], records["engine_steps"]
    if missing > MISSING_SHARE * steps:
        warnings.append(Warn.NO_WORKER_RECORDS(missing=missing, steps=steps))
    if torn := records["torn_lines"]:
        warnings.append(Warn.TORN_TRIAL(count=torn))
    return warnings


def _of_requests(measured: Measured) -> list[RunWarning]:
    requests, lag = measured.requests, measured.lag_ms
    scheduled = requests["scheduled"]
    warnings = [
        Warn.REQUESTS_LOST(count=requests[how], scheduled=scheduled, how=how)
        for how in ("failed", "cancelled")
        if requests[how]
    ]
    if scheduled != sum(requests[k] for k in ("ok", "failed", "cancelled")):
        warnings.append(Warn.NOT_RECONCILED())
    if lag and not lag.valid:
        warnings.append(Warn.SENT_LATE(p99=lag.p99, budget=lag.budget))
    return warnings


def run_warnings(
    run: RunRecord, roles: Roles, noise: NoiseFloor, machine: MachineEntry | None
) -> list[RunWarning]:
    """Warn of doubts about the run as a whole; the gravest comes first."""
    warnings = []
    if machine and machine.refused:
        out = sum(server.left_out is not None for server in machine.servers)
        warnings.append(Warn.REFUSED(count=out, servers=len(machine.servers)))
    if noise.differs and noise.pair and noise.over_baseline:
        warnings.append(
            Warn.EQUALS_DIFFER(
                pair=" and ".join(noise.pair), apart=noise.over_baseline.percent
            )
        )
    if run.provenance.get("git_dirty"):
        warnings.append(Warn.UNCOMMITTED())
    if noise.pair is None:
        warnings.append(Warn.NO_NOISE_FLOOR())
    for role in ("baseline", "twin", "floor"):
        if len(names := roles.named(role)) > 1:
            warnings.append(Warn.ROLE_TWICE(names=", ".join(names), role=role))
    return warnings
