# SPDX-License-Identifier: Apache-2.0
"""Make a trace like the 1,000 requests that the reference study sampled and replayed.

`python -m studies.reference_study.sample` sets the study's figures beside these, and
writes fleet/traces/study_sample.jsonl.xz. One population, at the same rate at any time:
sessions of one turn, most of whose prompts are new, and sessions that grow. The mean
prompt, the cached share and the classes of the first 200 requests leave little room:
with 24,000 new tokens on average, a quarter of the first prompts has more than 50,000,
so these have few more, and so on in each class.

The study's authors call such a sample (whole sessions, by chance) invalid for reuse
across sessions: of 52 % of the trace's blocks it shares 16 to 20 % (1e1e2e7).

Lengths are spread evenly over the quantiles of each group, so every seed has the same
ones; the seed shuffles who has which, when sessions begin, and how long they think.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from kvtax_fleet.trace import Request
from numpy.typing import NDArray

Points = tuple[tuple[float, float], ...]

DURATION_S = 7_200.0
BLOCK_TOKENS = 64
DECODE_TOKENS_PER_S = 50.0
# Time for a turn, by which sessions of many turns begin earlier.
TURN_S = 48.0
# Shared by all first prompts.
SYSTEM_TOKENS = 2_432
# Growth of a prompt over the turn before: mostly a small tool result, at times a file.
STEP_TOKENS = ((0, 250), (0.75, 1_700), (0.77, 5_500), (1, 9_000))
OUTPUT_TOKENS = ((0, 1), (0.5, 80), (0.9, 1_000), (1, 10_500))
# From the answer to the next turn, in the whole trace: mean 37 s.
THINK_S = (
    (0, 0.2),
    (0.25, 0.69),
    (0.5, 1.6),
    (0.75, 8.6),
    (0.9, 44),
    (0.99, 738),
    (1, 1_500),
)


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


# The study's three largest sessions, two more, others that grow, and first prompts
# without a second.
GROUPS = (
    Group(1, 36, _all(27_000), _all(98_000), 0.52),
    Group(1, 36, _all(15_000), _all(106_000), 0.535),
    Group(1, 25, _all(36_000), _all(95_000), 0.69),
    Group(2, 24, _all(40_000), _all(94_000), 0.53),
    Group(16, 13, ((0, 12_000), (1, 30_000)), ((0, 36_000), (1, 70_000)), 0.53),
    Group(
        647,
        1,
        (
            (0, 3_200),
            (0.04, 4_600),
            (0.045, 7_500),
            (0.34, 11_500),
            (0.36, 22_500),
            (0.755, 27_500),
            (0.77, 52_500),
            (1, 57_000),
        ),
    ),
)


class Turns(NamedTuple):
    """One turn at each place; every column has the same length."""

    session: NDArray[Any]
    turn: NDArray[Any]
    arrival_s: NDArray[Any]
    think_s: NDArray[Any]
    input_tokens: NDArray[Any]
    output_tokens: NDArray[Any]


def sampled_requests(seed: int = 42) -> list[Request]:
    """Make the 1,000 requests, in order of arrival; equal seeds give equal ones.

    A prompt begins with the prompt of the turn before, and all begin alike.
    """
    turns = _turns(np.random.default_rng(seed))
    order = np.argsort(turns.arrival_s, kind="stable")
    system = list(range(SYSTEM_TOKENS // BLOCK_TOKENS))
    next_id = len(system)
    prompts: dict[int, list[int]] = {}
    requests = []
    for values in zip(*(column[order].tolist() for column in turns), strict=True):
        session, turn, arrival_s, think_s, input_tokens, output_tokens = values
        blocks = input_tokens // BLOCK_TOKENS
        known = prompts.get(session, system)[:blocks]
        new = blocks - len(known)
        prompts[session] = known + list(range(next_id, next_id + new))
        next_id += new
        requests.append(
            Request(
                arrival_s=arrival_s,
                session=f"s{session}",
                turn=turn,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                hashes=prompts[session],
                block_tokens=BLOCK_TOKENS,
                think_s=think_s if turn else None,
            )
        )
    return requests


def _turns(rng: np.random.Generator) -> Turns:
    prompts = [prompt for group in GROUPS for prompt in _prompts(rng, group)]
    counts = np.array([len(each) for each in prompts])
    session = np.repeat(np.arange(len(prompts)), counts)
    output_tokens = _evenly(rng, OUTPUT_TOKENS, len(session))
    think_s = np.round(log_linear(THINK_S, _places(rng, len(session))), 3)
    return Turns(
        session=session,
        turn=sum_within(session, np.ones(len(session), np.int64)) - 1,
        arrival_s=_arrivals_s(session, _begins_s(rng, counts), output_tokens, think_s),
        think_s=think_s,
        input_tokens=np.concatenate(prompts),
        output_tokens=output_tokens,
    )


def _arrivals_s(
    session: NDArray[Any],
    begins_s: NDArray[Any],
    output_tokens: NDArray[Any],
    think_s: NDArray[Any],
) -> NDArray[Any]:
    """Compute when turns are sent: a think time after the answer before was decoded.

    `begins_s` has a time for each session.
    """
    waited_s = think_s.copy()
    waited_s[1:] += output_tokens[:-1] / DECODE_TOKENS_PER_S
    waited_s[firsts(session)] = begins_s
    return np.round(sum_within(session, waited_s), 3)


def firsts(session: NDArray[Any]) -> NDArray[Any]:
    """Find the places of the sessions' first turns."""
    return np.flatnonzero(np.diff(session, prepend=-1))


def sum_within(session: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Compute running sums that begin anew with each session."""
    first = firsts(session)
    sums = np.cumsum(values)
    before = sums[first] - values[first]
    return np.asarray(sums - np.repeat(before, np.diff(np.append(first, len(session)))))


def _begins_s(rng: np.random.Generator, counts: NDArray[Any]) -> NDArray[Any]:
    """Spread the begins of sessions that grow evenly, and those of the others."""
    begins_s = np.empty(len(counts))
    for group in (counts > 1, counts == 1):
        begins_s[group] = DURATION_S * _places(rng, group.sum())
    latest_s = DURATION_S - TURN_S * (counts - 1)
    return begins_s * latest_s / DURATION_S


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
    return np.asarray(np.rint(begin + (end - begin) * way), np.int64)


def _power(way: NDArray[Any], mean: float) -> float:
    """Find the power that gives values between 0 and 1 this mean."""
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if (way**middle).mean() > mean else (low, middle)
    return low


def _evenly(rng: np.random.Generator, points: Points, count: int) -> NDArray[Any]:
    """Spread lengths evenly over the quantiles, in an order by chance."""
    return np.asarray(np.rint(log_linear(points, _places(rng, count))), np.int64)


def log_linear(points: Points, at: NDArray[Any]) -> NDArray[Any]:
    """Interpolate the quantile function through (share, value), log-linearly."""
    shares, values = zip(*points, strict=True)
    return np.asarray(np.exp(np.interp(at, shares, np.log(values))))


def _places(rng: np.random.Generator, count: int) -> NDArray[Any]:
    """Return evenly spread places between 0 and 1, in an order by chance."""
    return (rng.permutation(count) + 0.5) / count
