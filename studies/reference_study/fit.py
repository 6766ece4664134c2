# SPDX-License-Identifier: Apache-2.0
"""Set the twin of the reference study's sample, and a forward fitted to the study's
latencies, beside its own figures.

The forward has two free values: what every step takes, and the share of an H20's time
at peak that arithmetic takes. They are fitted to three rows; the others are predicted.
The fit needs dozens of replays, so these run on a model of the fleet that takes half a
second, not on vLLM: steps of 8,192 tokens that begin with the decodes, prefixes kept
least recently used beside the requests that run, the rule of the policy `linear`.
`--run` adds a column with vLLM's own scheduler in virtual time. The last table shows
from which load on the fleet answers no more requests per second.
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from kvtax_fleet.analyze.analysis import FleetAnalysis
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
    SYSTEM_TOKENS,
    StudySample,
    sampled_requests,
)

from kvtax.engine.settings import Forward
from kvtax.records.files import read_document
from kvtax.report.markdown import table
from kvtax.stats.latency import tpot_of
from studies.harness import main
from studies.reference_study import reference

# The section of reference.csv, and the largest sessions in it.
SAMPLE = "sample of 1,000 requests"
LARGEST = ("1569319", "1206593", "178176")
INSTANCES = 8
KV_TOKENS = 281_888
STEP_TOKENS = 8_192
BLOCK_TOKENS = 16
TIME_SCALE = 20
LOADS = (1, 2, 4, 8, 15, 30)
# `linear` keeps a session where it is up to this many times the mean load.
OVERLOAD = 2
# fleet/configs/profiles/h20-30b-a3b.toml has the sources of these, at 60 % of the peak.
PEAK_US_PER_TOKEN = 44.6
PEAK_US_PER_CONTEXT_TOKEN = 0.00531


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the option of `python -m studies.reference_study.fit`."""
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="result of fleet/configs/experiments/study_sample.toml in virtual time",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the twin's figures, the fitted forward and its figures."""
    requests = sampled_requests(StudySample())
    print(twin_table(figures(requests)))
    first = requests[:FIRST_REQUESTS]
    fitted = fit(first)
    print("\n[forward]")
    for name, value in msgspec.structs.asdict(fitted).items():
        print(f"{name} = {float(f'{value:.3g}'):g}")
    print()
    columns = {
        "fitted": latencies(first, fitted),
        "at an H20's peak": latencies(first, forward_of(fitted.forward_us, 1.0)),
    }
    if arguments.run is not None:
        columns["vLLM's scheduler"] = latencies_of_run(arguments.run)
    print(latency_table(columns))
    print(f"\n{saturation_table(requests, fitted)}")
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


@dataclass
class Sent:
    """Request in flight; `computed`: tokens whose KV is there."""

    request: Request
    following: list[Request]  # turns of its session
    instance: Instance
    sent_s: float
    new_tokens: int
    computed: int = 0
    answered: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        return max(1, self.request.output_tokens)


@dataclass
class Instance:
    """Engine: its requests, and the prompt of each session that it keeps."""

    waiting: deque[Sent] = field(default_factory=deque)
    running: list[Sent] = field(default_factory=list)
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    busy: bool = False
    load_tokens: int = 0
    routed_tokens: int = 0

    def cached(self, request: Request) -> int:
        tokens = self.kept.get(request.session, 0)
        if not tokens and self.kept and request.input_tokens >= SYSTEM_TOKENS:
            tokens = SYSTEM_TOKENS
        return min(tokens, request.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def keep(self, request: Request) -> None:
        self.kept.pop(request.session, None)
        self.kept[request.session] = request.input_tokens
        room = KV_TOKENS - self._held_tokens
        while sum(self.kept.values()) > room and len(self.kept) > 1:
            self.kept.popitem(last=False)

    @property
    def _held_tokens(self) -> int:
        """Tokens whose KV a request that runs holds."""
        return sum(one.request.input_tokens for one in self.running)

    def step(self) -> list[tuple[Sent, int]]:
        """Schedule a step: the tokens that it computes of each request."""
        left = STEP_TOKENS
        planned = []
        decodes_first = sorted(self.running, key=lambda one: not one.answered)
        for one in decodes_first:
            tokens = min(left, max(1, one.request.input_tokens - one.computed))
            planned.append((one, tokens))
            left -= tokens
        while self.waiting and left > 0:
            needed = self._held_tokens + self.waiting[0].request.input_tokens
            if needed > KV_TOKENS and self.running:
                break
            one = self.waiting.popleft()
            one.computed = self.cached(one.request)
            self.running.append(one)
            tokens = min(left, one.request.input_tokens - one.computed)
            planned.append((one, tokens))
            left -= tokens
        return [(one, tokens) for one, tokens in planned if tokens > 0]


class Fleet:
    """Instances behind `linear`, with `slots` sessions in flight at most."""

    def __init__(self, requests: list[Request], slots: int, forward: Forward) -> None:
        self.instances = [Instance() for _ in range(INSTANCES)]
        self.ended: list[Sent] = []
        self._forward = forward
        self._free = slots
        self._begun: deque[list[Request]] = deque()
        self._homes: dict[str, Instance] = {}
        self._events: list[tuple[float, int, Any, Any]] = []
        self._number = count()
        sessions: dict[str, list[Request]] = {}
        for request in requests:
            sessions.setdefault(request.session, []).append(request)
        for turns in sessions.values():
            self._at(turns[0].arrival_s / TIME_SCALE, self._begin, turns)

    def play(self) -> None:
        """Replay everything."""
        while self._events:
            now_s, _, happens, subject = heapq.heappop(self._events)
            happens(now_s, subject)

    def _at(self, time_s: float, happens: Any, subject: Any) -> None:
        event = time_s, next(self._number), happens, subject
        heapq.heappush(self._events, event)

    def _begin(self, now_s: float, turns: list[Request]) -> None:
        if self._free:
            self._free -= 1
            self._send(now_s, turns)
        else:
            self._begun.append(turns)

    def _send(self, now_s: float, turns: list[Request]) -> None:
        request, *following = turns
        instance = self._route(request)
        self._homes[request.session] = instance
        new_tokens = request.input_tokens - instance.cached(request)
        instance.load_tokens += request.input_tokens
        instance.routed_tokens += request.input_tokens
        sent = Sent(request, following, instance, now_s, new_tokens)
        instance.waiting.append(sent)
        if not instance.busy:
            self._step(now_s, instance)

    def _route(self, request: Request) -> Instance:
        home = self._homes.get(request.session)
        total = sum(one.load_tokens for one in self.instances)
        if home and home.load_tokens * INSTANCES <= OVERLOAD * total:
            return home
        return min(
            self.instances, key=lambda one: one.load_tokens - one.cached(request)
        )

    def _step(self, now_s: float, instance: Instance) -> None:
        planned = instance.step()
        instance.busy = bool(planned)
        if not planned:
            return
        tokens = sum(each for _, each in planned)
        attended = sum(
            each * one.computed + each * (each - 1) / 2 for one, each in planned
        )
        took_us = (
            self._forward.forward_us
            + self._forward.us_per_token * tokens
            + self._forward.us_per_context_token * attended
        )
        self._at(now_s + took_us / 1e6, self._computed, (instance, planned))

    def _computed(self, now_s: float, step: tuple[Instance, list[Any]]) -> None:
        instance, planned = step
        for one, tokens in planned:
            one.computed += tokens
            if one.computed < one.request.input_tokens:
                continue
            one.answered += 1
            if one.answered == 1:
                one.first_s = now_s
                instance.keep(one.request)
            if one.answered == one.output_tokens:
                self._end(now_s, one)
        self._step(now_s, instance)

    def _end(self, now_s: float, one: Sent) -> None:
        one.end_s = now_s
        one.instance.running.remove(one)
        one.instance.load_tokens -= one.request.input_tokens
        self.ended.append(one)
        if one.following:
            think_s = (one.following[0].think_s or 0) / TIME_SCALE
            self._at(now_s + think_s, self._send, one.following)
        elif self._begun:
            self._send(now_s, self._begun.popleft())
        else:
            self._free += 1


def forward_of(step_us: float, share: float) -> Forward:
    """Return a forward whose arithmetic takes this share of the time at peak."""
    return Forward(
        step_us, share * PEAK_US_PER_TOKEN, share * PEAK_US_PER_CONTEXT_TOKEN
    )


def _stated() -> dict[str, float]:
    """Return the study's latencies: s for TTFT and E2E, ms for TPOT."""
    overall = reference.figures("R: 200 requests, at most one session per GPU")
    by_class = reference.figures("R: by class of new tokens")
    imbalance = reference.figures(SAMPLE)["first 200: token imbalance, sticky"]
    return {
        **{name: overall[f"linear: {name}"] for name in LEVELS},
        **{
            f"{kind} {name}": by_class[f"linear, {kind}: {name}"]
            for kind in CLASSES
            for name in LEVELS[:3]
        },
        TWICE: overall[TWICE],
        "token imbalance": imbalance,
    }


LEVELS = ("TTFT p50", "TTFT p90", "TPOT p90", "E2E p50")
TWICE = "TPOT p90, 16 sessions"
# Rows to which the forward is fitted.
FITTED = {"TPOT p90", "MEDIUM TTFT p50", "HEAVY TTFT p50"}
LATENCIES = _stated()


def latencies(requests: list[Request], forward: Forward) -> dict[str, float]:
    """Replay requests, 8 and 16 sessions at a time; return the rows of LATENCIES."""
    fleet = Fleet(requests, INSTANCES, forward)
    fleet.play()
    found = _latencies("", fleet.ended)
    for name in CLASSES:
        own = [one for one in fleet.ended if _class(one.new_tokens) == name]
        found |= _latencies(f"{name} ", own)
    twice = Fleet(requests, 2 * INSTANCES, forward)
    twice.play()
    routed = [instance.routed_tokens for instance in fleet.instances]
    found["token imbalance"] = max(routed) / min(routed)
    found[TWICE] = _latencies("", twice.ended)["TPOT p90"]
    return found


def _latencies(prefix: str, ended: list[Sent]) -> dict[str, float]:
    ttft_s = [one.first_s - one.sent_s for one in ended]
    tpot_s = [tpot_of(one.first_s, one.end_s, one.output_tokens) for one in ended]
    tpot_ms = [1e3 * each for each in tpot_s if each is not None]
    e2e_s = [one.end_s - one.sent_s for one in ended]
    return {
        f"{prefix}TTFT p50": float(np.quantile(ttft_s, 0.5)),
        f"{prefix}TTFT p90": float(np.quantile(ttft_s, 0.9)),
        f"{prefix}TPOT p90": float(np.quantile(tpot_ms, 0.9)),
        f"{prefix}E2E p50": float(np.quantile(e2e_s, 0.5)),
    }


def fit(requests: list[Request]) -> Forward:
    """Fit the forward to the rows of LATENCIES that are for it."""
    steps_us = [1e3 * ms for ms in range(66, 78, 2)]
    shares = [percent / 100 for percent in range(40, 101, 5)]
    step_us = min(steps_us, key=lambda us: _misfit(requests, forward_of(us, 0.6)))
    share = min(shares, key=lambda each: _misfit(requests, forward_of(step_us, each)))
    return forward_of(step_us, share)


def _misfit(requests: list[Request], forward: Forward) -> float:
    found = latencies(requests, forward)
    ratios = [found[name] / LATENCIES[name] for name in FITTED]
    return float(np.square(np.log(ratios)).sum())


def latencies_of_run(folder: Path) -> dict[str, float]:
    """Read the rows of LATENCIES from a run's analysis.json."""
    analysis = read_document(folder / "analysis.json", FleetAnalysis)
    arms = msgspec.to_builtins(analysis.arms)
    found = {}
    for name, levels in arms["linear@1"]["latency"]["all"].items():
        prefix = "" if name == "all" else f"{name} "
        for row, metric, quantile, unit in (
            ("TTFT p50", "ttft_ms", "p50", 1e3),
            ("TTFT p90", "ttft_ms", "p90", 1e3),
            ("TPOT p90", "tpot_ms", "p90", 1),
            ("E2E p50", "e2e_ms", "p50", 1e3),
        ):
            # A class with few requests has no p90.
            if level := levels[metric][quantile]:
                found[prefix + row] = level["value"] / unit
    found["token imbalance"] = arms["linear@1"]["repeats"][0]["imbalance"][
        "max_over_min"
    ]
    twice = arms["linear@2"]["latency"]["all"]["all"]
    found[TWICE] = twice["tpot_ms"]["p90"]["value"]
    return found


def latency_table(columns: dict[str, dict[str, float]]) -> str:
    """Format the latencies beside the study's, as Markdown; TTFT and E2E in s."""
    return table(
        ["", "study", "use", *columns],
        [
            [
                name if "TPOT" not in name else f"{name}, ms",
                f"{study:g}",
                "fitted" if name in FITTED else "predicted",
                *(
                    _beside(found[name], study) if name in found else "-"
                    for found in columns.values()
                ),
            ]
            for name, study in LATENCIES.items()
        ],
    )


def _beside(found: float, study: float) -> str:
    return f"{found:.3g} ({100 * (found / study - 1):+.0f} %)"


def saturation_table(requests: list[Request], forward: Forward) -> str:
    """Replay all requests, as many at a time as there are slots; return a table."""
    at_once = [msgspec.structs.replace(one, arrival_s=0.0) for one in requests]
    rows = []
    for load in LOADS:
        fleet = Fleet(at_once, load * INSTANCES, forward)
        fleet.play()
        # Neither the beginning nor the longest sessions alone.
        early, late = len(requests) // 5, len(requests) * 7 // 10
        took_s = fleet.ended[late].end_s - fleet.ended[early].end_s
        found = _latencies("", fleet.ended)
        rows.append(
            [
                f"{load}",
                f"{(late - early) / took_s:.2f}",
                *(f"{found[name]:.3g}" for name in ("TTFT p50", "TTFT p90")),
                f"{found['TPOT p90']:.0f}",
            ]
        )
    head = ["requests per instance", "requests/s", "TTFT p50, s", "TTFT p90, s"]
    return table([*head, "TPOT p90, ms"], rows)


if __name__ == "__main__":
    main("reference_study.fit", __doc__, configure, run)
