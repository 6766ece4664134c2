# SPDX-License-Identifier: Apache-2.0
"""Make a trace like the 1,000 requests that the reference study sampled and replayed.

`python -m studies.reference_study.sample` sets the study's figures beside these. A
stationary trace cannot have them all. Half of the first 200 requests have more than
20,000 new tokens, so the average one has at least 17,000. With a mean prompt of 33,600
tokens and 71 % of the blocks seen before, the average request of the sample has 9,700.
So the trace has two parts: sessions that begin and end within the first 200 requests
(FIRST), and those that follow (NEXT).

Lengths are spread evenly over the quantiles of each group, so every seed has the same
ones; the seed shuffles who has which, when sessions begin, and how long they think.
"""

from __future__ import annotations

from os import PathLike
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvtax_fleet.trace import trace_file
from kvtax_fleet.trace.request import Request
from kvtax_fleet.trace.synth import (
    Contexts,
    Turns,
    arrivals_s,
    firsts,
    lasts,
    log_normal,
    turn_numbers,
)
from kvtax_fleet.trace.twin import OUTPUT_TOKENS, THINK_S, log_linear_tokens

Points = tuple[tuple[float, float], ...]

REQUESTS = 1_000
FIRST_REQUESTS = 200
DURATION_S = 7_200.0
BLOCK_TOKENS = 64
# Time for a turn, by which sessions of many turns begin earlier.
TURN_S = 40.0
# Shared by all first prompts that are longer.
SYSTEM_TOKENS = 5_120
# Growth of a prompt over the turn before: mostly a small tool result, at times a file.
STEP_TOKENS = ((0, 100), (0.73, 900), (0.75, 6_000), (1, 9_500))


class Group(NamedTuple):
    """Sessions alike.

    `first_tokens`, `last_tokens`: shares of the sessions, and the tokens that so many
    first (last) prompts stay below. `mean_growth`: growth until the mean turn, as a
    share of the session's; more than a half if most of it comes early.
    """

    sessions: int
    turns: int
    first_tokens: Points
    last_tokens: Points = ()
    mean_growth: float = 0.5


def _all(tokens: float) -> Points:
    return (0, tokens), (1, tokens)


# Five long sessions, and prompts half of which are heavy.
FIRST = (
    Group(5, 12, ((0, 66_000), (1, 74_000)), ((0, 92_000), (1, 104_000)), 0.58),
    Group(2, 2, _all(30_000), _all(36_000)),
    Group(
        136,
        1,
        (
            (0, 8_500),
            (0.31, 25_200),
            (0.54, 32_000),
            (0.76, 55_200),
            (0.89, 63_000),
            (1, 110_000),
        ),
    ),
)
# The study's three largest sessions, two more, and prompts most of which are small.
NEXT = (
    Group(1, 36, _all(27_000), _all(98_000), 0.52),
    Group(1, 36, _all(15_000), _all(106_000), 0.535),
    Group(1, 25, _all(36_000), _all(95_000), 0.69),
    Group(2, 24, _all(40_000), _all(94_000), 0.53),
    Group(15, 10, ((0, 20_000), (1, 42_000)), ((0, 62_000), (1, 135_000)), 0.53),
    Group(505, 1, ((0, 1_020), (0.922, 20_000), (1, 45_000))),
)


class StudySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first `requests` of the sample."""

    requests: Annotated[
        int, Meta(ge=1, le=REQUESTS, description="the first N of 1,000")
    ] = REQUESTS
    seed: Annotated[int, Meta(ge=0, description="equal seeds give equal traces")] = 42


def study_sample(shape: StudySample, out: str | PathLike[str]) -> dict[str, Any]:
    """Write a trace to `out` in our own format; return its header.

    Raises TraceError: `out` cannot be written.
    """
    header = {
        "requests": shape.requests,
        "source": {
            "made_by": "kvtax trace study-sample",
            "shape": msgspec.to_builtins(shape),
        },
    }
    trace_file.write_trace(out, header, sampled_requests(shape))
    return header


def sampled_requests(shape: StudySample) -> list[Request]:
    """Make the requests, in order of arrival."""
    rng = np.random.default_rng(shape.seed)
    first = _part(rng, FIRST, 0, 0.0, DURATION_S * FIRST_REQUESTS / REQUESTS)
    begin_s = float(first.arrival_s.max())
    following = _part(rng, NEXT, int(first.session.max()) + 1, begin_s, DURATION_S)
    turns = Turns(*map(np.concatenate, zip(first, following, strict=True)))
    contexts = Contexts(SYSTEM_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)
    return list(contexts.requests(turns))[: shape.requests]


def _part(
    rng: np.random.Generator,
    groups: tuple[Group, ...],
    first_session: int,
    from_s: float,
    until_s: float,
) -> Turns:
    """Make the turns of sessions that begin between `from_s` and `until_s`."""
    prompts = [prompt for group in groups for prompt in _prompts(rng, group)]
    counts = np.array([len(each) for each in prompts])
    latest_s = until_s - TURN_S * (counts - 1)
    begins_s = from_s + rng.random(len(prompts)) * (latest_s - from_s)
    session = np.repeat(np.arange(len(prompts)), counts)
    input_tokens = np.concatenate(prompts)
    output_tokens = _evenly(rng, OUTPUT_TOKENS, len(session))
    think_s = np.round(log_normal(rng, THINK_S, len(session)), 3)
    blocks = input_tokens // BLOCK_TOKENS
    kept = np.append(0, blocks[:-1])
    kept[firsts(session)] = 0
    return Turns(
        session=session + first_session,
        turn=turn_numbers(session),
        arrival_s=arrivals_s(session, begins_s, output_tokens, think_s),
        think_s=think_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        kept=kept,
        shares_system=input_tokens >= SYSTEM_TOKENS,
        last=lasts(session),
    )


def _prompts(rng: np.random.Generator, group: Group) -> list[NDArray[Any]]:
    """Draw the prompts' lengths of each session of a group."""
    begins = _evenly(rng, group.first_tokens, group.sessions)
    if group.turns == 1:
        return list(begins[:, None])
    ends = _evenly(rng, group.last_tokens, group.sessions)
    return [
        _growing(rng, group, begin, end)
        for begin, end in zip(np.sort(begins), np.sort(ends), strict=True)
    ]


def _growing(
    rng: np.random.Generator, group: Group, begin: int, end: int
) -> NDArray[Any]:
    """Draw the prompts' lengths of a session from its first and its last one."""
    steps = _evenly(rng, STEP_TOKENS, group.turns - 1)
    way = np.append(0, np.cumsum(steps)) / steps.sum()
    way **= _power(way, group.mean_growth)
    return np.rint(begin + (end - begin) * way).astype(np.int64)


def _power(way: NDArray[Any], mean: float) -> float:
    """Find the power that gives values between 0 and 1 this mean."""
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (way**middle).mean() > mean else (low, middle)
    return low


def _evenly(rng: np.random.Generator, points: Points, count: int) -> NDArray[Any]:
    """Spread lengths evenly over the quantiles, in an order by chance."""
    return log_linear_tokens(points, (rng.permutation(count) + 0.5) / count)
