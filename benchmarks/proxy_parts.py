# SPDX-License-Identifier: Apache-2.0
"""Parts of the proxy, timed in this process: decisions, and the body of a request."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import timeit
from pathlib import Path
from typing import Literal

import numpy as np
from kvtax_fleet.instances import write_instances
from kvtax_fleet.launch.kvindexd import kvindexd
from kvtax_fleet.policies import (
    POLICIES,
    Candidate,
    RequestInfo,
    Snapshot,
    parameters_of,
)
from kvtax_fleet.proxy.body import Body
from kvtax_fleet.proxy.kvindexd import Kvindexd
from kvtax_fleet.proxy.router import Mirror
from kvtax_fleet.records.instances import Instance

from kvtax.report.markdown import table

INSTANCES = 8


def decision_us(policy: str, instances: int, number: int) -> tuple[float, float]:
    """p50 and p99 of `number` calls of the policy function, each on a new snapshot."""
    random = np.random.default_rng(instances)
    roles: list[Literal["both", "prefill", "decode"]] = ["both"]
    if policy == "pd_sep":
        roles = ["prefill", "decode"]
    decide, parameters = POLICIES[policy].decide, parameters_of(policy, {})
    times = []
    for call in range(number):
        loads = random.integers(0, 30_000, (instances, 3)).tolist()
        candidates = [
            Candidate(f"i{n}", roles[n % len(roles)], a % 16, b, c, a)
            for n, (a, b, c) in enumerate(loads)
        ]
        snapshot = Snapshot(candidates, f"i{call % instances}", call, 0)
        ask = RequestInfo("s", 33_000)
        start = timeit.default_timer()
        decide(ask, snapshot, parameters)
        times.append((timeit.default_timer() - start) * 1e6)
    return tuple(np.percentile(times, [50, 99]))


def decisions_table(number: int) -> str:
    rows = [
        [
            policy,
            *("{:.1f}/{:.1f}".format(*decision_us(policy, n, number)) for n in (8, 64)),
        ]
        for policy in POLICIES
    ]
    return table(["policy", "8 instances", "64 instances"], rows)


def body_table(number: int) -> str:
    """Time the parts of a body of 33k token ids on the event loop, in us."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 150_000, 33_000).tolist()
    raw = json.dumps({"prompt": ids, "model": "null"}).encode()
    body = Body(raw)
    mirror = Mirror(INSTANCES, 10**6)
    keys = body.keys()
    for instance in range(INSTANCES):
        mirror.add(instance, keys, 1.0)
    fresh = iter([Body(raw) for _ in range(number)])  # a body keeps its keys
    parts = {
        "top level of the JSON, token count": lambda: Body(raw),
        "mirror: keys of its pieces": lambda: next(fresh).keys(),
        "mirror: look-up": lambda: mirror.depths(keys),
    }
    times_us = {
        name: [1e6 * timeit.timeit(part, number=1) for _ in range(number)]
        for name, part in parts.items()
    }
    times_us["exact: asking kvindexd (CPU time)"] = _asking_us(body, number)
    rows = []
    for name, times in times_us.items():
        p50, p99 = np.percentile(times, [50, 99])
        rows.append([name, f"{p50:,.0f}/{p99:,.0f}"])
    return table(["", "us"], rows)


def _asking_us(body: Body, number: int) -> list[float]:
    """Return this thread's CPU time for each of `number` requests to a kvindexd.

    It follows nobody: what it has to say is small in any case. Raises ServerError.
    """
    names = [f"i{n}" for n in range(INSTANCES)]

    async def ask(address: str) -> list[float]:
        times = []
        async with Kvindexd(address, names) as client:
            for _ in range(number):
                begun_ns = time.thread_time_ns()
                await client.cached_tokens(body)
                times.append((time.thread_time_ns() - begun_ns) / 1000)
        return times

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "instances.json"
        nobody = f"ipc://{scratch}/nobody"
        write_instances(
            file, [Instance(n, f"http://{n}", kv_events=nobody) for n in names]
        )
        with kvindexd(file, Path(scratch) / "log") as address:
            return asyncio.run(ask(address))
