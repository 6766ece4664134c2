# SPDX-License-Identifier: Apache-2.0
"""Run directories with known truth, written as the launcher and the driver would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from kvtax.cli import main
from kvtax.engine.connector import connector_names, load_connector
from kvtax.records.files import LineFile, write_document
from kvtax.records.profile import Ladder
from kvtax.records.requests import (
    CpuReading,
    DriverEnd,
    Phase,
    PhaseStart,
    RequestRecord,
    RequestsHeader,
)
from kvtax.records.run import (
    IdleCost,
    PlanEntry,
    ReadCounts,
    Role,
    RunRecord,
    TrialRecord,
)
from kvtax.records.steps import METHOD_FIELDS, EngineHeader, WorkerHeader
from tests.harness.made_up import FIRST_NS, STEP_NS, profile, step_columns, write_lines


class Report(NamedTuple):
    """What a sweep wrote: per_config.json, SUMMARY.md, and the data of report.html."""

    folder: Path
    document: dict[str, Any]
    summary: str
    page: dict[str, Any]


def report_of(folder: Path) -> Report:
    """Analyse the run in `folder`, and read the report."""
    assert main(["sweep", "--report", str(folder)]) == 0
    document = json.loads((folder / "per_config.json").read_text())
    summary = (folder / "SUMMARY.md").read_text()
    return Report(folder, document, summary, page_of(folder))


def page_of(folder: Path) -> dict[str, Any]:
    """What report.html shows, as data: its sections by title, and all of it."""
    text = (folder / "report.html").read_text()
    data = text.partition('id="data">')[2].partition("</script>")[0]
    page = json.loads(data)
    return page | {
        "by_title": {section["title"]: section for section in page["sections"]}
    }


@dataclass
class Truth:
    """One config: what its steps cost (us), and how the costs move."""

    name: str
    slope: float = 0.0  # us per 1,000 blocks, in schedule()
    drift: float = 0.0  # the same by time, of the whole trial, instead of |cache|
    build_meta: float | None = None
    get_finished: float | None = None
    repeat_offsets: tuple[float, ...] = (0.0,)
    fails: str | None = None
    reads: ReadCounts | None = None


def ar1(rng: np.random.Generator, n: int, rho: float, sd: float) -> np.ndarray:
    """Gaussian AR(1) noise of standard deviation `sd`."""
    shocks = rng.normal(0, sd * np.sqrt(1 - rho**2), n)
    values = np.empty(n)
    last = rng.normal(0, sd)
    for index, shock in enumerate(shocks):
        last = values[index] = rho * last + shock
    return values


def with_outliers(rng: np.random.Generator, us: np.ndarray, share: float) -> np.ndarray:
    """`share` of the steps 2 to 100 times slower, as when a core is stolen."""
    hit = rng.random(len(us)) < share
    return np.where(hit, us * rng.uniform(2, 100, len(us)), us)


LADDER = Ladder(
    levels=[0.0, 0.3, 0.6, 0.92, 1.0],
    passes=5,
    decoders=8,
    output_tokens=200,
    arrivals=8,
    arrivals_rps=12.0,
    many_decoders=32,
)
# A hold has a prefill in so many steps.
PREFILL_EVERY = 20


class Span(NamedTuple):
    """A phase of a trial: its first step, how many it has, and the level of a hold.

    `reset` is whether the cache was reset before it; `decoders` decode in it.
    """

    name: str
    first: int
    count: int
    level: int | None = None
    reset: bool = False
    decoders: int = LADDER.decoders


def layout(steps: int) -> list[Span]:
    """A quarter growth, a tenth plateau, and the holds of the passes.

    The levels of a pass come in random order, with a reset before a lower one; then the
    lowest and the stated one with many decoders.
    """
    growth, plateau = steps // 4, steps // 10
    spans = [Span("growth", 0, growth), Span("plateau", growth, plateau)]
    rng = np.random.default_rng(0)
    order = []
    for _ in range(LADDER.passes):
        levels = rng.permutation(len(LADDER.levels))
        order += [(int(level), LADDER.decoders) for level in levels]
        many = rng.permutation([0, LADDER.stated_level])
        order += [(int(level), LADDER.many_decoders) for level in many]
    each = (steps - growth - plateau) // len(order)
    for number, (level, decoders) in enumerate(order):
        name = Phase.HOLD.at(number, level, decoders)
        first = growth + plateau + number * each
        reset = level <= order[number - 1][0] if number else True
        spans.append(Span(name, first, each, level, reset, decoders))
    # The last has what is left over.
    spans[-1] = spans[-1]._replace(count=steps - spans[-1].first)
    return spans


def trial_steps(
    truth: Truth, repeat: int, seed: int, steps: int, blocks: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Engine and worker records of the phases of `layout`."""
    rng = np.random.default_rng(seed)
    number = np.arange(steps)
    cache = np.zeros(steps)
    batch = np.full(steps, LADDER.decoders)
    prefill = np.where(number % PREFILL_EVERY == PREFILL_EVERY - 1, 512, 0)
    batch = batch + (prefill > 0)
    for span in layout(steps):
        own = slice(span.first, span.first + span.count)
        batch[own] += span.decoders - LADDER.decoders
        if span.name == "growth":
            cache[own] = np.linspace(0, blocks, span.count)
            # The batch grows with |cache|, as the load of a filling server does.
            sizes = 3 + 4 * cache[own] / blocks + rng.normal(0, 1.5, span.count)
            batch[own] = np.clip(np.round(sizes), 1, 9)
        elif span.level is None:
            cache[own] = blocks - rng.integers(0, 50, span.count)
        else:
            share = LADDER.levels[span.level]
            more = np.linspace(0, 0.01, span.count)
            cache[own] = blocks * np.minimum(share + more, 1.0)
    cache = cache.astype(int)
    time = np.linspace(0, blocks, steps)
    grown = truth.slope * cache / 1_000 + truth.drift * time / 1_000
    noise = np.abs(ar1(rng, steps, 0.9, 4)) + rng.exponential(4, steps)
    offset = truth.repeat_offsets[repeat % len(truth.repeat_offsets)]
    meta = truth.build_meta or 0.0
    schedule_cpu = 40 + 3 * batch + grown + noise + offset + meta
    schedule = with_outliers(rng, schedule_cpu, 0.02)
    finished = (truth.get_finished or 0.0) + rng.exponential(0.5, steps)
    execute = 600 + 2 * batch + finished + 1.2 + rng.exponential(6, steps)
    update = 30 + rng.exponential(3, steps)
    engine = step_columns(
        "engine",
        number,
        schedule_us=schedule.round(3),
        step_us=(schedule + execute + update + 12).round(3),
        running=batch.astype(int),
        scheduled=batch.astype(int),
        prefill_tokens=prefill,
        decode_tokens=batch.astype(int),
        cache_size=cache,
        free_blocks=blocks - cache,
        update_us=update.round(3),
        schedule_cpu_us=schedule_cpu.round(3),
        update_cpu_us=update.round(3),
        thread_cpu_us=(schedule_cpu + update + 12).round(3),
    )
    worker = step_columns(
        "worker", np.arange(steps), execute_model_us=execute.round(3)
    ) | {"t_ns": engine["t_ns"] + 60_000}
    if truth.build_meta is not None:
        engine["build_meta_us"] = (meta + grown).round(3)
        worker |= {
            "bind_us": np.full(steps, 0.4),
            "start_load_kv_us": np.full(steps, 0.6),
            "wait_for_save_us": np.full(steps, 0.2),
            "get_finished_us": finished.round(3),
        }
    return pl.DataFrame(engine), pl.DataFrame(worker)


THREAD = 77


@dataclass
class Cpu:
    """CPU time of each step in us: of all processes, and of the thread THREAD."""

    processes: np.ndarray
    thread: np.ndarray

    def readings(self, span: Span) -> Iterator[CpuReading]:
        """Yield the driver's readings at the edges of a hold."""
        for step in (span.first, span.first + span.count):
            ns, of_thread = (
                round(1e3 * float(us[:step].sum()))
                for us in (self.processes, self.thread)
            )
            yield CpuReading(FIRST_NS + step * STEP_NS, ns, {THREAD: of_thread})


def write_requests(
    path: Path, steps: int, tpot_ms: float, cpu: Cpu | None = None
) -> None:
    """The driver's records of a trial of `steps` steps: 10 requests per phase."""
    spans = layout(steps)
    count = 10 * len(spans)
    with LineFile(path, RequestsHeader(plan={}, scheduled=count)) as file:
        for place, span in enumerate(spans):
            start_ns = FIRST_NS + span.first * STEP_NS
            reset_ns = start_ns if span.reset else None
            file.append(PhaseStart(span.name, start_ns, reset_ns))
            for reading in cpu.readings(span) if cpu and span.level is not None else ():
                file.append(reading)
            for index in range(10):
                sent_ns = start_ns + index * 1_000_000
                first_ns = sent_ns + 5_000_000
                file.append(
                    RequestRecord(
                        id=10 * place + index,
                        phase=span.name,
                        status="ok",
                        http_status=200,
                        prompt_tokens=4096,
                        output_tokens=101,
                        intended_ns=sent_ns - 100_000,
                        sent_ns=sent_ns,
                        first_token_ns=first_ns,
                        end_ns=first_ns + int(100 * tpot_ms * 1e6),
                    )
                )
        file.append(
            DriverEnd(
                scheduled=count,
                ok=count,
                failed=0,
                cancelled=0,
                lag_ms={"p50": 0.1, "p99": 0.5, "max": 0.9},
                lag_budget_ms=2.0,
                valid=True,
            )
        )


PROFILE = profile(LADDER)


def write_run(
    folder: Path,
    truths: list[Truth],
    repeats: int = 2,
    steps: int = 4_000,
    blocks: int = 16_000,
    **changes: Any,
) -> Path:
    """A whole run directory; `changes` go into run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "profile": PROFILE,
        "provenance": {
            "vllm_version": "0.18.1",
            "cpu_model": "made up",
            "command_line": "none: synthetic",
        },
        "plan": [PlanEntry(t.name, r) for r in range(repeats) for t in truths],
        "configs": configured_roles(truth.name for truth in truths),
    }
    write_document(folder / "run.json", RunRecord(**settings | changes))
    for number, truth in enumerate(truths):
        for repeat in range(repeats):
            seed = 1_000 * number + repeat
            write_trial(folder, truth, repeat, seed, steps, blocks)
    return folder


def configured_roles(names: Iterable[str]) -> dict[str, Role]:
    """Return the roles that configs/connectors/ gives to `names`."""
    known = set(connector_names())
    return {name: load_connector(name).report for name in names if name in known}


def write_trial(
    folder: Path, truth: Truth, repeat: int, seed: int, steps: int, blocks: int
) -> Path:
    """One trial directory."""
    trial = folder / truth.name / f"r{repeat}"
    trial.mkdir(parents=True)
    record = TrialRecord(
        config=truth.name,
        repeat=repeat,
        status="failed" if truth.fails else "ok",
        error=truth.fails,
        num_blocks=blocks,
        block_size=16,
        reads=truth.reads,
        pss_mib=1_000.0 + repeat,
        idle=IdleCost(seconds=2.0, cpu_s=0.05, steps=0),
    )
    write_document(trial / "trial.json", record)
    if truth.fails:
        return trial
    engine, worker = trial_steps(truth, repeat, seed, steps, blocks)
    in_engine, in_worker = (
        [method for method, field in fields.items() if field in side.columns]
        for fields, side in zip(METHOD_FIELDS.values(), (engine, worker), strict=True)
    )
    header = EngineHeader(pid=1, methods=in_engine)
    write_lines(trial / "engine_step.jsonl", header, [engine])
    header = WorkerHeader(pid=1, methods=in_worker)
    write_lines(trial / "worker_step.r0.jsonl", header, [worker])
    tpot_ms = float(engine["step_us"].median()) / 1e3
    write_requests(trial / "requests.jsonl", steps, tpot_ms)
    return trial
