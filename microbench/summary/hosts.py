# SPDX-License-Identifier: Apache-2.0
"""A run over several hosts: what each had a part in, and how far they are apart."""

from __future__ import annotations

from lab.records.per_config import HostEntry, PerConfig
from lab.stats.markdown import DASH, number
from microbench.analysis.roles import Roles
from page.document import Table

NOTE = (
    "Each host measured all configs in each of its repeats. A server is set aside if "
    "it was more than 1.5 times as slow as usual in this run, by work in which no "
    "connector has a part. `schedule()` and step: p50 in µs at the stated |cache|."
)


def hosts(document: PerConfig, roles: Roles) -> Table | None:
    """None for a run on one machine."""
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
