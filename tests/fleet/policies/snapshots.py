# SPDX-License-Identifier: Apache-2.0
"""What a policy is asked: single snapshots, and any."""

from __future__ import annotations

from hypothesis import strategies as st

from fleet.policies import (
    POLICIES,
    Ask,
    Candidate,
    Decision,
    Snapshot,
    parameters_of,
)


def candidate(name: str, role: str = "both", **load: int) -> Candidate:
    zeros = dict.fromkeys(
        ("requests", "ongoing_tokens", "pending_prefill_tokens", "cached_tokens"), 0
    )
    return Candidate(name, role, **(zeros | load))


def decide(
    policy: str,
    candidates: list[Candidate],
    prompt_tokens: int = 1000,
    pinned: str | None = None,
    arrivals: int = 0,
    offloads: int = 0,
    offloaded: int = 0,
    pinned_turns: int = 0,
    pinned_at_tokens: int | None = None,
    **parameters: float,
) -> Decision:
    before = pinned_turns, pinned_at_tokens
    snapshot = Snapshot(candidates, pinned, arrivals, offloads, offloaded, *before)
    ask = Ask("s", prompt_tokens)
    return POLICIES[policy](ask, snapshot, parameters_of(policy, parameters))


loads = st.integers(0, 50_000)
any_role = st.sampled_from(["both", "prefill", "decode"])


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(1, 9))
    candidates = [
        Candidate(
            f"i{n}",
            draw(any_role),
            *(draw(loads) for _ in range(4)),
            draw(st.none() | st.integers(1_000, 200_000)),
        )
        for n in range(count)
    ]
    names = st.sampled_from([one.name for one in candidates] + ["gone"])
    pinned = draw(st.none() | names)
    small = st.integers(0, 99), st.integers(0, 3), st.integers(0, 9), st.integers(0, 20)
    return Snapshot(candidates, pinned, *map(draw, small), draw(st.none() | loads))


asks = st.builds(Ask, st.none() | st.just("s"), st.integers(1, 60_000))
