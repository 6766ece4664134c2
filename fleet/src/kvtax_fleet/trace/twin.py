# SPDX-License-Identifier: Apache-2.0
"""Make a trace with the statistics of the reference study's (stats_tables.FIGURES).

Sessions are cut out of a stationary process, so the lengths of all requests are as
stated at any moment, and by construction: a session begins at a random quantile of the
prompts' lengths and climbs by a small step each turn. Beyond the longest prompt the
context is compacted: it goes on from the shortest, with nothing kept. A prompt
otherwise begins with the one before it. A first turn that is long enough begins with
the system prompt that all sessions share.

The study gives three figures for the lengths of prompts and two for those of answers.
Between them lengths are log-linear in the quantile, and the ends are chosen so that the
means come out. Turns are chosen for its reuse: one call in four fifths of the sessions
and a few to dozens in the others, with the step and the system prompt. The sessions of
its sample of 1,000 requests are others: kvtax_fleet.trace.study_sample has those.

The beginnings and turns of sessions are spread evenly (Roberts' R2 sequence, which the
seed shifts), not drawn one by one: a thinner trace is nearly as close to the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from os import PathLike
from typing import Annotated, Any

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
    sum_within,
    turn_numbers,
)

# Shares and the tokens (turns) that so many prompts (answers, sessions) stay below.
INPUT_TOKENS = ((0, 1_020), (0.5, 20_000), (0.9, 88_000), (1, 160_000))
OUTPUT_TOKENS = ((0, 1), (0.5, 80), (0.9, 775), (1, 8_192))
TURNS = ((0, 1), (0.8, 1), (1, 43))
STEP = 0.0075  # of the quantile, from a turn to the next, mean: 1,150 tokens
SYSTEM_TOKENS = 10_752
THINK_S = 15.0
# Sessions begin so long before the trace, of which they show the rest.
WARM_UP_S = 1_800.0
R2 = (0.7548776662466927, 0.5698402909980532)
SESSIONS_AT_ONCE = 1 << 13


class Twin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the trace; the rest is the study's."""

    requests: Annotated[int, Meta(ge=1, description="how many")] = 2_114_220
    duration_s: Annotated[float, Meta(gt=0, description="in about this time")] = 7_200.0
    seed: Annotated[int, Meta(ge=0, description="equal seeds give equal traces")] = 0
    block_tokens: Annotated[
        int, Meta(ge=1, le=2_048, description="block size; reuse is off above 512")
    ] = 512


def twin(shape: Twin, out: str | PathLike[str]) -> dict[str, Any]:
    """Write a trace to `out` in our own format; return its header.

    Memory: the sessions under way, however long the trace is.

    Raises TraceError: `out` cannot be written.
    """
    header = {
        "requests": shape.requests,
        "source": {
            "made_by": "kvtax trace twin",
            "shape": msgspec.to_builtins(shape),
            "input_tokens": INPUT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "turns": TURNS,
            "step": STEP,
            "system_tokens": SYSTEM_TOKENS,
            "think_s": THINK_S,
        },
    }
    trace_file.write_trace(out, header, islice(_requests(shape), shape.requests))
    return header


def _requests(shape: Twin) -> Iterator[Request]:
    """Yield requests in order of arrival, without end."""
    contexts = Contexts(SYSTEM_TOKENS // shape.block_tokens, shape.block_tokens)
    waiting: Turns | None = None
    for turns, until_s in _drawn(shape):
        if waiting is not None:
            turns = Turns(*map(np.concatenate, zip(waiting, turns, strict=True)))
        due = turns.arrival_s < until_s
        yield from contexts.requests(turns.at(due))
        waiting = turns.at(~due)


def _drawn(shape: Twin) -> Iterator[tuple[Turns, float]]:
    """Draw turns of sessions, and when the next sessions begin, without end."""
    rng = np.random.default_rng(shape.seed)
    shifts = rng.random(2)
    turns_mean = _turns(np.arange(0.5, 100_000) / 100_000).mean()
    interval_s = shape.duration_s / shape.requests * turns_mean
    number, now_s = 0, -WARM_UP_S
    while True:
        names = np.arange(number, number + SESSIONS_AT_ONCE)
        begins_s = now_s + np.cumsum(rng.exponential(interval_s, len(names)))
        quantiles, places = (
            (names * constant + shift) % 1
            for constant, shift in zip(R2, shifts, strict=True)
        )
        yield (
            _sessions(shape, rng, names, begins_s, quantiles, _turns(places)),
            round(begins_s[-1], 3),
        )
        number, now_s = number + len(names), begins_s[-1]


def _turns(places: NDArray[Any]) -> NDArray[Any]:
    return np.rint(log_linear(TURNS, places)).astype(np.int64)


def _sessions(
    shape: Twin,
    rng: np.random.Generator,
    names: NDArray[Any],
    begins_s: NDArray[Any],
    quantiles: NDArray[Any],
    counts: NDArray[Any],
) -> Turns:
    """Make the turns of sessions with these first prompts, as far as they are seen."""
    session = np.repeat(names, counts)
    steps = rng.exponential(STEP, len(session))
    steps[firsts(session)] = quantiles
    rounds, quantile = np.divmod(sum_within(session, steps), 1)
    input_tokens = log_linear_tokens(INPUT_TOKENS, quantile)
    evenly = (rng.permutation(len(session)) + rng.random(len(session))) / len(session)
    output_tokens = log_linear_tokens(OUTPUT_TOKENS, evenly)
    think_s = np.round(log_normal(rng, THINK_S, len(session)), 3)
    arrival_s = arrivals_s(session, begins_s, output_tokens, think_s)

    seen = arrival_s >= 0
    session, rounds, input_tokens = session[seen], rounds[seen], input_tokens[seen]
    blocks = input_tokens // shape.block_tokens
    compacted = np.diff(rounds, prepend=0) > 0
    kept = np.roll(blocks, 1)
    kept[compacted] = 0
    return Turns(
        session=session,
        turn=turn_numbers(session),
        arrival_s=arrival_s[seen],
        think_s=think_s[seen],
        input_tokens=input_tokens,
        output_tokens=output_tokens[seen],
        blocks=blocks,
        kept=kept,
        shares_system=input_tokens >= SYSTEM_TOKENS,
        last=lasts(session),
    )


def log_linear(
    points: tuple[tuple[float, float], ...], at: NDArray[Any]
) -> NDArray[Any]:
    """Interpolate the quantile function through (share, value), log-linearly."""
    shares, values = zip(*points, strict=True)
    return np.exp(np.interp(at, shares, np.log(values)))


def log_linear_tokens(
    points: tuple[tuple[float, float], ...], at: NDArray[Any]
) -> NDArray[Any]:
    return np.rint(log_linear(points, at)).astype(np.int64)
