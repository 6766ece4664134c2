# SPDX-License-Identifier: Apache-2.0
"""Make a trace of agentic sessions with a stated reuse.

A session begins with a system prompt and a task. Every turn appends the answer before
and the tools' results, so each prompt begins with the one before it, except where an
agent rewrites its context: from some block on, all is new. As many turns are rewritten
as bring the reuse down to the stated one, to the block.

Lengths and think times are log-normal, turns geometric, sessions arrive as a Poisson
process. An answer takes its tokens at DECODE_TOKENS_PER_S.

Turns are columns (`Turns`), which kvtax_fleet.trace.study_sample uses, too; `Contexts`
makes requests of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvtax_fleet.trace import trace_file
from kvtax_fleet.trace.request import Request, TraceError


class Shape(msgspec.Struct, frozen=True):
    """Shape of the sessions; the defaults are like those of coding agents."""

    sessions: Annotated[int, Meta(ge=1, description="how many")]
    seed: Annotated[int, Meta(ge=0, description="equal seeds give equal traces")] = 0
    block_tokens: Annotated[int, Meta(ge=1, description="block size")] = 64
    turns: Annotated[float, Meta(ge=1, description="turns per session, mean")] = 20.0
    system_tokens: Annotated[int, Meta(ge=0, description="system prompt")] = 12_000
    system_share: Annotated[
        float, Meta(ge=0, le=1, description="share of sessions with the same one")
    ] = 0.8
    task_tokens: Annotated[float, Meta(ge=1, description="task, mean")] = 4_000.0
    tool_tokens: Annotated[float, Meta(ge=1, description="added per turn, mean")] = (
        600.0
    )
    output_tokens: Annotated[float, Meta(ge=1, description="per answer, mean")] = 445.0
    max_input_tokens: Annotated[
        int, Meta(ge=1, description="a session ends before a longer prompt")
    ] = 131_072
    think_s: Annotated[float, Meta(gt=0, description="between turns, mean")] = 15.0
    interval_s: Annotated[float, Meta(gt=0, description="between sessions, mean")] = 5.0
    reuse: Annotated[
        float, Meta(ge=0, le=1, description="blocks that an earlier turn had, share")
    ] = 0.91


def synth(shape: Shape, out: str | PathLike[str]) -> dict[str, Any]:
    """Write a trace to `out` in our own format; return its header.

    Memory: 100 bytes per request, and the prompts of the sessions under way.

    Raises TraceError: such sessions cannot have that reuse, or `out` cannot be written.
    """
    rng = np.random.default_rng(shape.seed)
    turns = _draw(shape, rng)
    blocks = int(turns.blocks.sum())
    system_blocks = shape.system_tokens // shape.block_tokens
    sharing = int(turns.shares_system[turns.turn == 0].sum())
    seen_elsewhere = max(0, sharing - 1) * system_blocks
    header = {
        "requests": len(turns.turn),
        "source": {
            "made_by": "kvtax trace synth",
            "shape": msgspec.to_builtins(shape),
            "decode_tokens_per_s": DECODE_TOKENS_PER_S,
            "blocks": blocks,
            "intra_session_reuse": int(turns.kept.sum()) / blocks,
            "cross_session_reuse": seen_elsewhere / blocks,
        },
    }
    contexts = Contexts(system_blocks, shape.block_tokens)
    trace_file.write_trace(out, header, contexts.requests(turns))
    return header


def _draw(shape: Shape, rng: np.random.Generator) -> Turns:
    counts = rng.geometric(1 / shape.turns, shape.sessions)
    session = np.repeat(np.arange(shape.sessions, dtype=np.int32), counts)
    output_tokens = _tokens(rng, shape.output_tokens, len(session))
    added = _tokens(rng, shape.tool_tokens, len(session))
    first = firsts(session)
    added[1:] += output_tokens[:-1]
    added[first] = shape.system_tokens + _tokens(rng, shape.task_tokens, len(first))
    added[first] = np.minimum(added[first], shape.max_input_tokens)
    input_tokens = sum_within(session, added)
    fits = input_tokens <= shape.max_input_tokens
    session, input_tokens = session[fits], input_tokens[fits]
    output_tokens = output_tokens[fits]

    first = firsts(session)
    think_s = np.round(log_normal(rng, shape.think_s, len(session)), 3)
    begins_s = np.cumsum(rng.exponential(shape.interval_s, shape.sessions))
    blocks = input_tokens // shape.block_tokens
    if not blocks.any():
        raise TraceError("no prompt has a whole block: make block_tokens smaller")
    kept = _kept(shape, rng, session, blocks)
    shares_system = rng.random(shape.sessions) < shape.system_share
    return Turns(
        session=session,
        turn=turn_numbers(session),
        arrival_s=arrivals_s(session, begins_s, output_tokens, think_s),
        think_s=think_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=blocks,
        kept=kept,
        shares_system=shares_system[session],
        last=lasts(session),
    )


def _kept(
    shape: Shape, rng: np.random.Generator, session: NDArray[Any], blocks: NDArray[Any]
) -> NDArray[Any]:
    """Choose each turn's leading blocks from the turn before, to reuse the share."""
    kept = np.append(0, blocks[:-1])
    kept[firsts(session)] = 0
    too_many = int(kept.sum() - round(shape.reuse * blocks.sum()))
    # A rewrite never touches the system prompt.
    rewritable = np.maximum(kept - shape.system_tokens // shape.block_tokens, 0)
    losses = np.ceil(rng.random(len(kept)) * rewritable).astype(np.int64)
    total = int(blocks.sum())
    highest = kept.sum() / total
    lowest = (kept.sum() - losses.sum()) / total
    if not 0 <= too_many <= losses.sum():
        raise TraceError(
            f"a reuse of {shape.reuse:.4f} is out of reach: such sessions have "
            f"{lowest:.4f} to {highest:.4f}. More turns or fewer tool_tokens raise it"
        )
    order = rng.permutation(len(kept))
    summed = np.cumsum(losses[order])
    kept[order] -= np.clip(too_many - (summed - losses[order]), 0, losses[order])
    return kept


def _tokens(rng: np.random.Generator, mean: float, n: int) -> NDArray[Any]:
    return np.maximum(1, np.rint(log_normal(rng, mean, n))).astype(np.int64)


DECODE_TOKENS_PER_S = 50.0
CHUNK = 1 << 14


class Turns(NamedTuple):
    """One turn at each place; every column has the same length."""

    session: NDArray[Any]
    turn: NDArray[Any]
    arrival_s: NDArray[Any]
    think_s: NDArray[Any]
    input_tokens: NDArray[Any]
    output_tokens: NDArray[Any]
    blocks: NDArray[Any]
    kept: NDArray[Any]  # blocks taken over from the turn before
    shares_system: NDArray[Any]  # whether its session begins with the system prompt
    last: NDArray[Any]  # of its session

    def at(self, places: NDArray[Any]) -> Turns:
        """Select the turns at these places: numbers, or a mask."""
        return Turns(*(column[places] for column in self))


class Contexts:
    """Source of block ids. Memory: the prompts of the sessions under way."""

    def __init__(self, system_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._system = list(range(system_blocks))
        self._next_id = system_blocks
        self._last: dict[int, list[int]] = {}  # each session's last prompt

    def requests(self, turns: Turns) -> Iterator[Request]:
        """Make the requests of some turns, in order of arrival."""
        order = np.argsort(turns.arrival_s, kind="stable")
        for begin in range(0, len(order), CHUNK):
            chunk = turns.at(order[begin : begin + CHUNK])
            for values in zip(*(column.tolist() for column in chunk), strict=True):
                yield self._request(*values)

    def _request(
        self,
        session: int,
        turn: int,
        arrival_s: float,
        think_s: float,
        input_tokens: int,
        output_tokens: int,
        blocks: int,
        kept: int,
        shares_system: bool,
        last: bool,
    ) -> Request:
        if turn == 0:
            hashes = self._system[:blocks] if shares_system else []
        else:
            hashes = self._last.pop(session)[:kept]
        new = blocks - len(hashes)
        hashes.extend(range(self._next_id, self._next_id + new))
        self._next_id += new
        if not last:
            self._last[session] = hashes
        return Request(
            arrival_s=arrival_s,
            session=f"s{session}",
            turn=turn,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            hashes=hashes,
            block_tokens=self._block_tokens,
            think_s=think_s if turn else None,
        )


def log_normal(rng: np.random.Generator, mean: float, n: int) -> NDArray[Any]:
    """Draw with a standard deviation of 1 in the logarithm: 37 % above the mean."""
    return rng.lognormal(np.log(mean) - 0.5, 1.0, n)


def firsts(session: NDArray[Any]) -> NDArray[Any]:
    """Find the places of the sessions' first turns."""
    return np.flatnonzero(np.diff(session, prepend=-1))


def lasts(session: NDArray[Any]) -> NDArray[Any]:
    """Mark the turns that are the last of their session."""
    return np.diff(session, append=-1) != 0


def sum_within(session: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Compute running sums that begin anew with each session."""
    first = firsts(session)
    sums = np.cumsum(values)
    before = sums[first] - values[first]
    return sums - np.repeat(before, np.diff(np.append(first, len(session))))


def turn_numbers(session: NDArray[Any]) -> NDArray[Any]:
    """Return 0, 1, ... within each session."""
    return sum_within(session, np.ones(len(session), np.int64)) - 1


def arrivals_s(
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
