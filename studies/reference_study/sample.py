# SPDX-License-Identifier: Apache-2.0
"""Set the twin of the reference study's sample beside the study's own figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from kvtax_fleet.policies.decision import (
    CLASSES,
    HEAVY_ABOVE_TOKENS,
    HUGE_ABOVE_TOKENS,
    WARM_BELOW_TOKENS,
)
from kvtax_fleet.trace import Request
from kvtax_fleet.trace.stats import describe
from kvtax_fleet.trace.study_sample import (
    FIRST_REQUESTS,
    StudySample,
    sampled_requests,
)

from kvtax.report.markdown import table
from studies.harness import main
from studies.reference_study import reference

# The section of reference.csv, and the largest sessions in it.
SAMPLE = "sample of 1,000 requests"
LARGEST = ("1569319", "1206593", "178176")
INSTANCES = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no option: the twin has none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the twin's figures beside the study's."""
    print(twin_table(figures(sampled_requests(StudySample()))))
    return 0


class Figure(NamedTuple):
    """A figure of the study and the twin's; `tolerance`: most that they differ by.

    No tolerance: no trace with the other figures has it.
    """

    name: str
    study: float
    here: float
    tolerance: float | None


def figures(requests: list[Request]) -> list[Figure]:
    """Compute the study's figures of its sample for a trace of 1,000 requests."""
    first = requests[:FIRST_REQUESTS]
    stated = reference.figures(SAMPLE)
    rows = [
        *_aggregates(requests),
        *_sessions(requests, first),
        *_classes(first),
        ("token imbalance, sticky", _imbalance(requests), 0.2),
        ("first 200: token imbalance, sticky", _imbalance(first), None),
    ]
    return [Figure(name, stated[name], here, most) for name, here, most in rows]


# A figure's name, the twin's, and the tolerance.
Here = tuple[str, float, float | None]


def _aggregates(requests: list[Request]) -> Iterator[Here]:
    found = describe(requests, "")
    within = 100 * (found.intra_session_share_of_reuse or 0)
    yield "requests", found.requests, 0
    yield "duration, s", found.duration_s, 150
    yield "input tokens, mean", found.input_tokens.mean, 700
    yield "input tokens, p50", found.input_tokens.p50, 600
    yield "input tokens, p90", found.input_tokens.p90, 4_000
    yield "output tokens, mean", found.output_tokens.mean, 5
    yield "output tokens, p50", found.output_tokens.p50, 2
    yield "input tokens per output token", found.io_ratio or 0, 1.5
    yield "prefill share, %", 100 * found.prefill_share, 1
    yield "reuse within the session, % of reuse", within, 1
    yield "APC, infinite cache, %", 100 * found.apc_infinite, 1.5


def _sessions(requests: list[Request], first: list[Request]) -> Iterator[Here]:
    for name, part in (("", requests), ("first 200: ", first)):
        found = describe(part, "", largest=3)
        top = 100 * found.top_sessions_share_of_input_tokens
        yield f"{name}sessions", found.sessions, 0
        yield f"{name}tokens of the top 5 sessions, %", top, 1
    largest = describe(requests, "", largest=3).largest_sessions
    for row, name in zip(largest, LARGEST, strict=True):
        tokens = row.input_tokens + row.output_tokens
        yield f"session {name}: turns", row.turns, 0
        yield f"session {name}: tokens", tokens, 40_000
        yield f"session {name}: first prompt", row.first_input_tokens, 0
        yield f"session {name}: growth", row.growth_tokens, 0


def _classes(first: list[Request]) -> Iterator[Here]:
    """Yield each class's share by new tokens, with an infinite cache."""
    seen: set[int] = set()
    classes = []
    for request in first:
        cached = sum(1 for _ in takewhile(seen.__contains__, request.hashes))
        seen.update(request.hashes)
        classes.append(_class(request.input_tokens - cached * request.block_tokens))
    for name in CLASSES:
        share = 100 * classes.count(name) / len(first)
        yield f"first 200: {name}, % of requests", share, 2.5


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


def twin_table(rows: list[Figure]) -> str:
    """Format the twin's figures beside the study's, as Markdown."""
    return table(
        ["", "study", "twin", "off by", "tolerance"],
        [
            [
                row.name,
                f"{row.study:,.10g}",
                f"{row.here:,.2f}",
                f"{row.here - row.study:+,.2f}",
                "none" if row.tolerance is None else f"{row.tolerance:,g}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main("reference_study.sample", __doc__, configure, run)
