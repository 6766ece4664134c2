# SPDX-License-Identifier: Apache-2.0
"""Make a trace like the 1,000 requests that the reference study sampled and replayed.

`python -m studies.reference_study.sample` sets the study's figures beside these. One
population, at the same rate at any time: sessions of one turn, most of whose prompts
are new, and sessions that grow. The mean prompt, the cached share and the classes of
the first 200 requests leave little room: with 24,000 new tokens on average, a quarter
of the first prompts has more than 50,000, so these have few more, and so on in each
class.

The study's authors call such a sample (whole sessions, by chance) invalid for reuse
across sessions: of 52 % of the trace's blocks it shares 16 to 20 % (1e1e2e7).

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
    log_linear,
    log_linear_tokens,
    turn_numbers,
)

Points = tuple[tuple[float, float], ...]

REQUESTS = 1_000
DURATION_S = 7_200.0
BLOCK_TOKENS = 64
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
    contexts = Contexts(SYSTEM_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)
    return list(contexts.requests(_turns(rng)))[: shape.requests]


def _turns(rng: np.random.Generator) -> Turns:
    prompts = [prompt for group in GROUPS for prompt in _prompts(rng, group)]
    counts = np.array([len(each) for each in prompts])
    session = np.repeat(np.arange(len(prompts)), counts)
    input_tokens = np.concatenate(prompts)
    output_tokens = _evenly(rng, OUTPUT_TOKENS, len(session))
    think_s = np.round(log_linear(THINK_S, _places(rng, len(session))), 3)
    blocks = input_tokens // BLOCK_TOKENS
    kept = np.append(0, blocks[:-1])
    kept[firsts(session)] = 0
    return Turns(
        session=session,
        turn=turn_numbers(session),
        arrival_s=arrivals_s(session, _begins_s(rng, counts), output_tokens, think_s),
        think_s=think_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        kept=kept,
        shares_system=np.ones(len(session), bool),
        last=lasts(session),
    )


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
    return log_linear_tokens(points, _places(rng, count))


def _places(rng: np.random.Generator, count: int) -> NDArray[Any]:
    """Return evenly spread places between 0 and 1, in an order by chance."""
    return (rng.permutation(count) + 0.5) / count
