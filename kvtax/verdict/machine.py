# SPDX-License-Identifier: Apache-2.0
"""Grade of the machine that a run was measured on: quiet, busy or disturbed.

Neighbours on other cores take memory bandwidth: they slow vLLM's own work and a
connector's alike, so shares of own work hold. A neighbour on the engine's own core also
empties its caches, which slows the two unequally: such servers are left out, and where
they are many, or all of the baseline's, nothing is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from kvtax.records.per_config import (
    Grade,
    GradedServer,
    MachineEntry,
    MachineRecord,
    ServerConditions,
)
from kvtax.verdict.holds import OWN
from kvtax.verdict.trials import LoadedTrial

# The engine's thread had work and no core for so much of the time that it needed one.
WAITED_SHARE = 0.25
# Of older runs, which do not say: so many cores were taken by others.
OTHERS_CORES = 0.3
# A run is refused with more of its servers disturbed.
MOST_LEFT_OUT = 0.25
# With fewer holds a server's p90 and p10 are single holds.
MIN_HOLDS = 8
# Half of the servers have a wider spread on a busy machine, or own work differs more
# between servers of one config, or more time is stolen.
QUIET_SPREAD, QUIET_APART, QUIET_STEAL = 1.3, 0.15, 0.01


def machine_record(trials: Sequence[LoadedTrial]) -> MachineRecord | None:
    """Collect the conditions of all servers; None if no trial has recorded any."""
    good = [trial for trial in trials if trial.steps is not None]
    loads = [(t, t.facts.machine if t.facts else None) for t in good]
    if not any(load for _, load in loads):
        return None
    return MachineRecord(
        cores=min((load.cores for _, load in loads if load), default=None),
        servers=[
            ServerConditions(
                config=trial.config,
                repeat=trial.repeat,
                steal_share=load.steal_share if load else None,
                others_cores=load.others_cores if load else None,
                cold_start=trial.facts.cold_start if trial.facts else None,
            )
            for trial, load in loads
        ],
    )


def graded(
    record: MachineRecord | None,
    holds: Mapping[str, pl.DataFrame],
    baseline: str | None,
) -> MachineEntry | None:
    """Grade the machine of a run; None if nothing of it was recorded."""
    if record is None:
        return None
    servers = [_graded(server, holds.get(server.config)) for server in record.servers]
    out = [server for server in servers if server.left_out]
    of_baseline = [server for server in servers if server.config == baseline]
    refused = len(out) > MOST_LEFT_OUT * len(servers) or (
        bool(of_baseline) and all(server.left_out for server in of_baseline)
    )
    busy = _busy(servers)
    grade: Grade = "disturbed" if out else "busy" if busy else "quiet"
    own = [server.own_us for server in servers if server.own_us]
    return MachineEntry(
        grade=grade,
        reasons=[
            *(f"{server.config} r{server.repeat}: {server.left_out}" for server in out),
            *busy,
        ],
        refused=refused,
        cores=record.cores,
        own_us=round(float(np.median(own)), 3) if own else None,
        servers=servers,
    )


def without_left_out(
    holds: Mapping[str, pl.DataFrame], machine: MachineEntry | None
) -> dict[str, pl.DataFrame]:
    """Take the holds of disturbed servers away; a config may have none then."""
    out = {
        (server.config, server.repeat)
        for server in (machine.servers if machine else [])
        if server.left_out
    }
    kept = {
        name: table.filter(
            ~pl.col("repeat").is_in([r for config, r in out if config == name])
        )
        for name, table in holds.items()
    }
    return {name: table for name, table in kept.items() if table.height}


def _graded(server: ServerConditions, table: pl.DataFrame | None) -> GradedServer:
    own = np.array([])
    waited = None
    if table is not None and OWN in table.columns:
        few = table.filter(pl.col("repeat") == server.repeat, pl.col("many") == 0)
        own = few[OWN].drop_nulls().to_numpy()
        waited = _waited_share(few)
    spread = None
    if len(own) >= MIN_HOLDS:
        low, high = np.quantile(own, (0.1, 0.9), method="inverted_cdf")
        spread = round(float(high / low), 4) if low > 0 else None
    return GradedServer(
        config=server.config,
        repeat=server.repeat,
        steal_share=server.steal_share,
        others_cores=server.others_cores,
        cold_start=server.cold_start,
        own_us=round(float(np.median(own)), 3) if len(own) else None,
        own_spread=spread,
        waited_share=None if waited is None else round(waited, 4),
        left_out=_disturbed(waited, server.others_cores),
    )


def _waited_share(holds: pl.DataFrame) -> float | None:
    """Return for how much of the time the engine's thread had work and no core."""
    if not {"waited", "engine"} <= set(holds.columns):
        return None
    known = holds.filter(pl.col("waited").is_finite(), pl.col("engine").is_finite())
    if not known.height:
        return None
    waited, ran = (float(known[name].to_numpy().sum()) for name in ("waited", "engine"))
    return waited / max(waited + ran, 1e-9)


def _disturbed(waited: float | None, others_cores: float | None) -> str | None:
    """Return why a server's holds do not count; None where they do."""
    if waited is not None:
        if waited <= WAITED_SHARE:
            return None
        return f"the engine's thread waited {waited:.0%} of its time for a core"
    if others_cores is None or others_cores <= OTHERS_CORES:
        return None
    return f"other processes took {others_cores:.2f} of a core"


def _busy(servers: Sequence[GradedServer]) -> list[str]:
    """Return the numbers that a quiet machine would not have."""
    reasons = []
    kept = [server for server in servers if not server.left_out]
    spreads = [server.own_spread for server in kept if server.own_spread]
    if spreads and (spread := float(np.median(spreads))) > QUIET_SPREAD:
        reasons.append(f"equal work took {spread:.2f} times as long in some holds")
    apart = _apart(kept)
    if apart > QUIET_APART:
        reasons.append(f"equal work took {apart:.0%} longer on some servers")
    stolen = max((server.steal_share or 0.0 for server in kept), default=0.0)
    if stolen > QUIET_STEAL:
        reasons.append(f"other machines had {stolen:.1%} of the cores' time")
    return reasons


def _apart(servers: Sequence[GradedServer]) -> float:
    """Return how far servers of one config are apart, in half of the configs."""
    by_config: dict[str, list[float]] = {}
    for server in servers:
        if server.own_us:
            by_config.setdefault(server.config, []).append(server.own_us)
    ratios = [max(us) / min(us) - 1 for us in by_config.values() if len(us) > 1]
    return float(np.median(ratios)) if ratios else 0.0
