# SPDX-License-Identifier: Apache-2.0
"""Set the twin of the reference study's sample beside the study's own figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from kvtax_fleet.policies.decision import (
    CLASSES,
    HEAVY_ABOVE_TOKENS,
    HUGE_ABOVE_TOKENS,
    WARM_BELOW_TOKENS,
)
from kvtax_fleet.trace import Request, write_trace
from kvtax_fleet.trace.stats import describe

from kvtax.report.markdown import table
from studies.harness import main
from studies.reference_study import reference
from studies.reference_study.population import sampled_requests

SAMPLE = "population: sample of 1,000"
FIRST = "population: its first 200"
WHOLE = "population: whole trace"
POPULATIONS = (WHOLE, SAMPLE, FIRST, "population: w600")
FIRST_REQUESTS = 200
LARGEST = ("1569319", "1206593", "178176")
INSTANCES = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --out, the trace to write."""
    parser.add_argument("--out", metavar="TRACE", help="also write the twin's requests")


def run(arguments: argparse.Namespace) -> int:
    """Print each figure of the study's populations, and the twin's."""
    if arguments.out:
        requests = sampled_requests()
        source = {"made_by": "python -m studies.reference_study.sample"}
        header = {"requests": len(requests), "source": source}
        write_trace(arguments.out, header, requests)
    print(table(*population_table()))
    return 0


class Figure(NamedTuple):
    """A figure of the study and the twin's; `tolerance`: most that they differ by.

    No tolerance: no rule gives it and the other figures.
    """

    population: str
    name: str
    study: float
    here: float
    tolerance: float | None


# A figure's name, the twin's, and the tolerance.
Here = tuple[str, float, float | None]


def figures(requests: list[Request]) -> list[Figure]:
    """Compute the study's figures of its sample for a trace of 1,000 requests."""
    first = requests[:FIRST_REQUESTS]
    rows: dict[str, Iterable[Here]] = {
        SAMPLE: [*_sessions(requests), *_reuse(requests), *_largest(requests)],
        FIRST: [*_sessions(first), *_classes(first)],
        # The study states these of the trace that the sample was drawn from.
        WHOLE: _lengths(requests),
    }
    return [
        Figure(population, name, reference.figures(population)[name], here, most)
        for population, own in rows.items()
        for name, here, most in own
    ]


def _lengths(requests: list[Request]) -> Iterator[Here]:
    stats = describe(requests, "")
    yield "duration, s", stats.duration_s, 300
    yield "input tokens, mean", stats.input_tokens.mean, 1_000
    yield "output tokens, p50", stats.output_tokens.p50, 2
    yield "prefill share, %", 100 * stats.prefill_share, 1


def _sessions(requests: list[Request]) -> Iterator[Here]:
    stats = describe(requests, "")
    whole = len(requests) > FIRST_REQUESTS
    if whole:
        yield "requests", stats.requests, 0
    yield "sessions", stats.sessions, 0 if whole else 8
    top = 100 * stats.top_sessions_share_of_input_tokens
    yield "tokens of the top 5 sessions, %", top, 1 if whole else 8
    tolerance = 0.2 if whole else None
    yield "token imbalance, sticky", _imbalance(requests), tolerance


def _reuse(requests: list[Request]) -> Iterator[Here]:
    """Yield what an infinite cache would save, and where."""
    stats = describe(requests, "")
    within = stats.intra_session_share_of_reuse or 0
    yield "APC, infinite cache, %", 100 * stats.apc_infinite, 1.5
    yield "reuse within the session, % of reuse", 100 * within, 1.5
    across = 100 * stats.apc_infinite * (1 - within)
    yield "tokens shared with other sessions, %", across, 0.5
    yield "input tokens per output token", stats.io_ratio or 0, 1.5
    new = new_tokens(requests)
    is_warm = [
        2 * n < request.input_tokens for n, request in zip(new, requests, strict=True)
    ]
    warm = [n for n, warm in zip(new, is_warm, strict=True) if warm]
    cold = [n for n, warm in zip(new, is_warm, strict=True) if not warm]
    share = 100 * len(warm) / len(requests)
    yield "more than half cached, % of requests", share, 2
    yield "at most half cached, % of requests", 100 - share, 2
    yield "new tokens where more than half is cached", median(warm), 400
    yield "new tokens where at most half is cached, at least", median(cold), 8_000


def _largest(requests: list[Request]) -> Iterator[Here]:
    largest = describe(requests, "").largest_sessions[: len(LARGEST)]
    for row, name in zip(largest, LARGEST, strict=True):
        tokens = row.input_tokens + row.output_tokens
        yield f"session {name}: turns", row.turns, 0
        yield f"session {name}: tokens", tokens, 40_000
        yield f"session {name}: first prompt", row.first_input_tokens, 0
        yield f"session {name}: growth", row.growth_tokens, 0


def _classes(first: list[Request]) -> Iterator[Here]:
    """Yield each class's share by new tokens, with an infinite cache."""
    classes = [_class(tokens) for tokens in new_tokens(first)]
    for name in CLASSES:
        share = 100 * classes.count(name) / len(first)
        yield f"{name}, % of requests", share, 4


def new_tokens(requests: list[Request]) -> list[int]:
    """Return each request's tokens that no earlier one had."""
    seen: set[int] = set()
    lengths = []
    for request in requests:
        cached = sum(1 for _ in takewhile(seen.__contains__, request.hashes))
        seen.update(request.hashes)
        lengths.append(request.input_tokens - cached * request.block_tokens)
    return lengths


def _class(new_tokens: float) -> str:
    limits = (WARM_BELOW_TOKENS, HEAVY_ABOVE_TOKENS + 1, HUGE_ABOVE_TOKENS + 1)
    return CLASSES[sum(new_tokens >= limit for limit in limits)]


def _imbalance(requests: list[Request]) -> float:
    """Return the most tokens that an instance gets by the fewest.

    A session stays where the fewest tokens had gone when it began.
    """
    tokens = [0] * INSTANCES
    homes: dict[str, int] = {}
    for request in requests:
        home = homes.setdefault(request.session, tokens.index(min(tokens)))
        tokens[home] += request.input_tokens
    return max(tokens) / min(tokens)


def population_table() -> tuple[list[str], list[list[str]]]:
    """Return heads and lines: each figure, and the twin's where it is fitted."""
    twin = {(row.population, row.name): row for row in figures(sampled_requests())}
    lines = []
    for population in POPULATIONS:
        for row in reference.rows(population):
            fitted = twin.get((population, row["figure"]))
            lines.append(
                [
                    population.removeprefix("population: "),
                    row["figure"],
                    f"{float(row['value']):.10g}",
                    row["source"],
                    "-" if fitted is None else f"{fitted.here:.1f}",
                    _tolerance(fitted),
                    row["withdrawn"],
                ]
            )
    heads = ["population", "figure", "study", "stated in"]
    return [*heads, "sample here", "held within", "withdrawn"], lines


def _tolerance(fitted: Figure | None) -> str:
    if fitted is None:
        return "-"
    return "not" if fitted.tolerance is None else f"{fitted.tolerance:g}"


if __name__ == "__main__":
    main("reference_study.sample", __doc__, configure, run)
