# SPDX-License-Identifier: Apache-2.0
"""Parts of the proxy, timed in this process: decisions, and the body of a request."""

from __future__ import annotations

import json
import timeit

import numpy as np

from fleet.policies import POLICIES, Ask, Candidate, Snapshot, parameters_of
from fleet.proxy.body import Body
from fleet.proxy.exact import BlockStored, Exact
from fleet.proxy.mirror import Mirror
from lab.stats.markdown import table


def decision_us(policy: str, instances: int, number: int) -> tuple[float, float]:
    """p50 and p99 of `number` calls of the policy function, each on a new snapshot."""
    random = np.random.default_rng(instances)
    roles = ("prefill", "decode") if policy == "pd_sep" else ("both",)
    decide, parameters = POLICIES[policy], parameters_of(policy, {})
    times = []
    for call in range(number):
        loads = random.integers(0, 30_000, (instances, 3)).tolist()
        candidates = [
            Candidate(f"i{n}", roles[n % len(roles)], a % 16, b, c, a)
            for n, (a, b, c) in enumerate(loads)
        ]
        snapshot = Snapshot(candidates, f"i{call % instances}", call, 0)
        ask = Ask("s", 33_000)
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
    """What the event loop spends on a body of 33k token ids, part by part, in us."""
    random = np.random.default_rng(1)
    ids = random.integers(0, 150_000, 33_000).tolist()
    raw = json.dumps({"prompt": ids, "model": "null"}).encode()
    body = Body(raw)
    mirror, exact = Mirror(8, 10**6), Exact(8)
    keys, hashes = body.keys(), list(range(len(ids) // 16))
    for instance in range(8):
        mirror.add(instance, keys, 1.0)
        exact.apply(instance, [BlockStored(hashes, None, ids[: 16 * len(hashes)], 16)])
    parts = {
        "top level of the JSON, token count": lambda: Body(raw),
        "mirror: keys of its pieces": body.keys,
        "mirror: look-up": lambda: mirror.depths(keys),
        "exact: keys of its blocks and look-up": lambda: exact.cached_tokens(
            body.prompt, "null"
        ),
    }
    rows = []
    for name, part in parts.items():
        times_us = [1e6 * timeit.timeit(part, number=1) for _ in range(number)]
        p50, p99 = np.percentile(times_us, [50, 99])
        rows.append([name, f"{p50:,.0f}/{p99:,.0f}"])
    return table(["", "us"], rows)
