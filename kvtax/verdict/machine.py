# SPDX-License-Identifier: Apache-2.0
"""Grade of the machine that a run was measured on: quiet, busy or disturbed.

Neighbours on other cores take memory bandwidth: they slow vLLM's own work and a
connector's alike, so shares of own work hold. A neighbour on the engine's own core also
empties its caches and holds its steps up, which slows the two unequally. So a hold in
which the engine's thread waited for a core is left out, a server with many such holds
is left out whole, and where such servers are many, nothing is judged.
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

# For so much of the time in which the engine's thread had work it had no core.
MOST_WAITED = 0.25
# A server with more of its holds left out is left out, a run with more of its servers.
MOST_HOLDS, MOST_SERVERS = 0.5, 0.25
# A core that the hypervisor gives to others is none of the thread's, whoever counts it.
MOST_STOLEN = 0.05
# Of older runs, which do not say how long the thread waited: cores taken by others.
OTHERS_CORES = 0.3
# With fewer holds a server's p90 and p10 are single holds.
MIN_HOLDS = 8
# On a busy machine half of the servers have a wider spread between holds, servers of
# half of the configs are further apart, more holds are left out, or more is stolen.
QUIET_SPREAD, QUIET_APART, QUIET_HOLDS, QUIET_STEAL = 1.3, 0.15, 0.05, 0.01


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
    refused = len(out) > MOST_SERVERS * len(servers) or (
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


def undisturbed(
    holds: Mapping[str, pl.DataFrame], machine: MachineEntry | None
) -> dict[str, pl.DataFrame]:
    """Select the holds of servers that count in which the thread had its core.

    A config may have none.
    """
    out = {
        (server.config, server.repeat)
        for server in (machine.servers if machine else [])
        if server.left_out
    }
    kept = {
        name: table.filter(
            ~pl.col("repeat").is_in([r for config, r in out if config == name]),
            ~_waited(table),
        )
        for name, table in holds.items()
    }
    return {name: table for name, table in kept.items() if table.height}


def _waited(table: pl.DataFrame) -> pl.Expr:
    """Return whether the engine's thread waited for a core in a hold."""
    if not {"waited", "engine"} <= set(table.columns):
        return pl.lit(False)
    share = pl.col("waited") / (pl.col("waited") + pl.col("engine"))
    return (share > MOST_WAITED).fill_null(False)


def _graded(server: ServerConditions, table: pl.DataFrame | None) -> GradedServer:
    own, out = np.array([]), None
    if table is not None and OWN in table.columns:
        few = table.filter(pl.col("repeat") == server.repeat, pl.col("many") == 0)
        if "waited" in few.columns and few["waited"].count():
            share = few.select(_waited(few).mean()).item()
            out = float(share or 0.0)
            few = few.filter(~_waited(few))
        own = few[OWN].drop_nulls().to_numpy()
    spread = None
    if len(own) >= MIN_HOLDS:
        low, high = np.quantile(own, (0.1, 0.9), method="inverted_cdf")
        spread = round(float(high / low), 4) if low > 0 else None
    return GradedServer(
        config=server.config,
        repeat=server.repeat,
        steal_share=server.steal_share,
        others_cores=server.others_cores,
        own_us=round(float(np.median(own)), 3) if len(own) else None,
        own_spread=spread,
        holds_out=None if out is None else round(out, 4),
        left_out=_disturbed(out, server.steal_share or 0.0, server.others_cores),
    )


def _disturbed(
    holds_out: float | None, steal_share: float, others_cores: float | None
) -> str | None:
    """Return why a server's holds do not count; None where they do."""
    if steal_share > MOST_STOLEN:
        return f"other machines had {steal_share:.0%} of the cores' time"
    if holds_out is not None:
        if holds_out <= MOST_HOLDS:
            return None
        return f"the engine's thread had no core of its own in {holds_out:.0%} of holds"
    if others_cores is None or others_cores <= OTHERS_CORES:
        return None
    return f"other processes took {others_cores:.2f} of a core"


def _busy(servers: Sequence[GradedServer]) -> list[str]:
    """Return the numbers that a quiet machine would not have."""
    reasons = []
    kept = [server for server in servers if not server.left_out]
    shares = [server.holds_out for server in kept if server.holds_out is not None]
    if shares and (share := float(np.mean(shares))) > QUIET_HOLDS:
        reasons.append(f"{share:.0%} of the holds had no core of their own: left out")
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
