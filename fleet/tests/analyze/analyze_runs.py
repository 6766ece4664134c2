# SPDX-License-Identifier: Apache-2.0
"""Fleet runs and frames of requests with known truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from kvtax.engine.connector import load_connector
from kvtax.records.files import write_document
from kvtax.records.requests import ReplayedRequest, ReplayEnd, ReplayHeader, Steady
from kvtax.records.run import Role
from kvtax.report import render

from kvtax_fleet.analyze.analysis import Analysis, analyse
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.fleet_report import report_page
from kvtax_fleet.analyze.frames import requests_frame
from kvtax_fleet.policies import POLICIES, parameters_of
from kvtax_fleet.policies.decision import RequestInfo
from kvtax_fleet.records.arm import ArmRecord, Freshness, MachineLoad
from kvtax_fleet.records.decisions import (
    Candidate,
    DecisionRecord,
    DecisionsHeader,
    Snapshot,
)
from kvtax_fleet.records.instances import Instance

INSTANCES = ("i0", "i1", "i2", "i3")
FIRST_NS = 10**14
OUTPUT = 101
SESSIONS, TURNS = 40, 6
MODEL = "qwen3-coder-30b-a3b"


@dataclass(frozen=True)
class Truth:
    """One arm. `report` is the role in its arm.json; None: that of the connector's
    config. `slower` multiplies TTFT and TPOT of every request of the baseline's.

    `hidden_hits`, `hidden_queries`: what an instance counts and no request is told;
    `wrong_belief`: tokens that the proxy takes to be cached and are not;
    `short_answers`: requests that got fewer tokens than asked for; `giants`: sessions
    of ten times the tokens; `misplaced`: decisions recorded as another instance's;
    `held`: sessions that waited for a slot.
    """

    arm: str
    policy: str = "linear"
    parameters: dict[str, Any] = field(default_factory=dict)
    connector: str = "plain"
    report: Role | None = None
    slower: float = 1.0
    repeats: int = 2
    fails: int = 0
    hidden_hits: int = 0
    hidden_queries: int = 0
    wrong_belief: int = 0
    concurrency: int = 2
    baseline: str = "linear"
    same_as: str | None = None
    status: str = "ok"
    saturated: str | None = None
    sessions: int = SESSIONS
    short_answers: int = 0
    giants: int = 0
    misplaced: int = 0
    steady_share: float = 0.9
    fresh: bool = True
    valid: bool = True
    held: int = 0


def write_run(folder: Path, truths: list[Truth], seed: int = 1) -> Path:
    for truth in truths:
        for repeat in range(truth.repeats):
            write_arm(folder / truth.arm / f"r{repeat}", truth, repeat, seed)
    return folder


def write_arm(folder: Path, truth: Truth, repeat: int, seed: int) -> None:
    """The same sessions in every arm and repeat; the noise is each one's own."""
    (folder / "metrics").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    shake = np.random.default_rng([seed, repeat, *truth.arm.encode()])
    requests, decisions = [], []
    counted = {name: [0, 0] for name in INSTANCES}
    for index in range(truth.sessions):
        session = f"s{index}"
        speed = rng.lognormal(0, 0.2)
        at_ns = FIRST_NS + index * 200_000_000
        context, pinned = 0, None
        for turn in range(TURNS):
            grown = int(rng.integers(500, 8_000))
            prompt = context + grown * (30 if index < truth.giants else 1)
            load = rng.integers(0, 50_000, len(INSTANCES))
            noise = shake.lognormal(0, 0.05)
            snapshot = Snapshot(
                [
                    Candidate(
                        name,
                        "both",
                        int(load[i] // 10_000),
                        int(load[i]),
                        int(load[i] // 2),
                        (context + truth.wrong_belief) * (name == pinned),
                    )
                    for i, name in enumerate(INSTANCES)
                ],
                pinned,
                index * TURNS + turn,
                0,
            )
            request = RequestInfo(session, prompt)
            parameters = parameters_of(truth.policy, truth.parameters)
            decision = POLICIES[truth.policy].decide(request, snapshot, parameters)
            cached = context if decision.instance == pinned else 0
            pinned = decision.instance
            ttft_ns = int((20 + (prompt - cached) * 0.05) * noise * truth.slower * 1e6)
            tpot_ns = int(10 * speed * noise * truth.slower * 1e6)
            end_ns = at_ns + ttft_ns + tpot_ns * (OUTPUT - 1)
            failed = turn == 0 and index < truth.fails
            request = ReplayedRequest(
                id=f"{session}/{turn}",
                session=session,
                turn=turn,
                arrival_s=index * 0.2,
                input_tokens=prompt,
                output_tokens=OUTPUT,
                intended_ns=at_ns,
                sent_ns=at_ns + 1_000_000,
                end_ns=end_ns,
                status="failed" if failed else "ok",
                error="HTTP 500" if failed else None,
                http_status=500 if failed else 200,
                instance=decision.instance,
            )
            if not failed:
                short = turn == 1 and index < truth.short_answers
                request.first_token_ns = at_ns + ttft_ns
                request.usage_prompt_tokens = prompt
                request.usage_completion_tokens = OUTPUT - short
                request.cached_tokens = cached
            requests.append(request)
            misplaced = turn == 2 and index < truth.misplaced
            other = INSTANCES[INSTANCES.index(decision.instance) - 1]
            decisions.append(
                DecisionRecord(
                    id=request.id,
                    number=len(decisions),
                    attempt=0,
                    session=session,
                    at_ns=at_ns + 1_100_000,
                    policy=truth.policy,
                    instance=other if misplaced else decision.instance,
                    prefill_instance=decision.prefill,
                    reason=decision.reason,
                    kind=decision.kind,
                    prompt_tokens=prompt,
                    form="ids",
                    cache="mirror",
                    scores=decision.scores,
                    snapshot=snapshot,
                    decision_us=10.0,
                )
            )
            if not failed:
                counted[decision.instance][0] += prompt
                counted[decision.instance][1] += cached
            context = prompt + OUTPUT
            at_ns = end_ns + 500_000_000
    _write(folder, truth, repeat, requests, decisions, counted)


def _write(
    folder: Path,
    truth: Truth,
    repeat: int,
    requests: list[ReplayedRequest],
    decisions: list[DecisionRecord],
    counted: dict[str, list[int]],
) -> None:
    times_ns = sorted(request.intended_ns for request in requests)
    bad = sum(request.status != "ok" for request in requests)
    end = ReplayEnd(
        scheduled=len(requests),
        ok=len(requests) - bad,
        failed=bad,
        cancelled=0,
        lag_ms={"p50": 0.2, "p90": 0.5, "p99": 1.0, "max": 2.0},
        lag_budget_ms=0.5 if not truth.valid else 10.0,
        valid=truth.valid,
        held_sessions=truth.held,
        steady=Steady(
            start_ns=times_ns[len(times_ns) // 10],
            end_ns=times_ns[int(len(times_ns) * truth.steady_share)],
        ),
    )
    header = ReplayHeader(scheduled=len(requests), sessions=truth.sessions)
    lines(folder / "replay.jsonl", [header, *requests, end])
    believed = DecisionsHeader(policy=truth.policy, parameters=truth.parameters)
    lines(folder / "decisions.jsonl", [believed, *decisions])
    arm = ArmRecord(
        experiment="synthetic",
        arm=truth.arm,
        repeat=repeat,
        policy=truth.policy,
        connector=truth.connector,
        report=truth.report or load_connector(truth.connector).report,
        concurrency=truth.concurrency,
        instances=[Instance(name, f"http://{name}") for name in INSTANCES],
        baseline=truth.baseline,
        same_as=truth.same_as,
        freshness=Freshness(fresh=truth.fresh, why=None if truth.fresh else "warm"),
        machine=MachineLoad(saturated=truth.saturated),
        status=truth.status,
        error=None if truth.status == "ok" else "an instance ended",
    )
    write_document(folder / "arm.json", arm)
    for name, (queries, hits) in counted.items():
        for when, sign in (("before", 0), ("after", 1)):
            text = prom(
                1_000 + sign * (queries + truth.hidden_queries),
                100 + sign * (hits + truth.hidden_hits),
            )
            (folder / "metrics" / f"{name}.{when}.prom").write_text(text)


def prom(queries: int, hits: int) -> str:
    """A /metrics text as vLLM writes it, split over two engines."""
    rows = []
    for name, value in (("queries", queries), ("hits", hits)):
        full = f"vllm:prefix_cache_{name}"
        rows += [
            f"# HELP {full}_total Prefix cache {name}.",
            f"# TYPE {full}_total counter",
        ]
        rows.append(f'{full}_total{{engine="0",model_name="m"}} {value - 10}.0')
        rows.append(f'{full}_total{{engine="1",model_name="m"}} 10.0')
        rows.append(f'{full}_created{{engine="0",model_name="m"}} 1.7e+09')
    return "\n".join(rows) + "\n"


def lines(path: Path, records: list[Any]) -> None:
    path.write_bytes(
        b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    )


def text_of(analysis: Analysis) -> str:
    """Render the report as Markdown, without figures."""
    return render.markdown(report_page(analysis.results))


def analysed(run: Path, *truths: Truth) -> tuple[Analysis, str]:
    """A run made of `truths`, analysed, and its report; without figures."""
    analysis = analyse(read_run(write_run(run, list(truths))), MODEL, 100.0)
    return analysis, text_of(analysis)


AB = ["a", "b"]


def requests(rows: list[dict]) -> pl.DataFrame:
    """A requests_frame of `rows`: what they leave out is a plain ok request."""
    empty = requests_frame([])
    plain = {
        "status": "ok",
        "turn": 0,
        "session": "s",
        "arm": "x",
        "repeat": 0,
        "usage_prompt_tokens": 100,
        "usage_completion_tokens": 0,
        "output_tokens": 0,
    }
    full = [
        dict.fromkeys(empty.columns)
        | {"id": f"r{i}", "first_token_ns": row.get("sent_ns")}
        | plain
        | row
        for i, row in enumerate(rows)
    ]
    return pl.DataFrame(full, schema=empty.schema)
