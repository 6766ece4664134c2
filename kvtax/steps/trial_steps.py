# SPDX-License-Identifier: Apache-2.0
"""From the step files of a trial to its table of engine steps.

The table has one row for each step that began in a phase; steps before the growth phase
(the dummy runs of an engine start) belong to none and are left out. Its columns:

- repeat, step_id, t_ns, phase (a number of kvtax.records.requests), hold, level and
  decoders (its place, kvtax.records.requests.Place), age_s (time since the prefix cache
  was reset), batch (requests scheduled), cache_blocks (|cache| at the end of
  schedule()), tokens (scheduled);
- decode_only: requests were scheduled, all of them decodes; prefills: prompt tokens
  were scheduled;
- the times in us of kvtax.records.steps, and the sums below; a time is null if it was
  not measured.

The sums are connector_us, overhead_us and worker_calls_us: see kvtax.steps.parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from kvtax.records.files import read_lines
from kvtax.records.requests import (
    CpuReading,
    Phase,
    PhaseStart,
    Place,
    Requests,
    place_of,
)
from kvtax.records.steps import WORKER_TIMES, ThreadsHeader, ThreadTimes
from kvtax.steps.parts import CALLS, method_columns, step_parts

ENGINE_TIMES = ("schedule_us", "build_meta_us", "step_us", "update_us")
STEP_TIMES = ENGINE_TIMES + WORKER_TIMES


def trial_steps(
    repeat: int, recorded: pl.DataFrame, phases: list[PhaseStart]
) -> pl.DataFrame:
    """Select the `recorded` steps of a life that ended and lie in a phase."""
    methods = method_columns(recorded)
    calls = [name.removesuffix("_us") + CALLS for name in methods]
    parts = step_parts(methods)
    spans = phase_spans(phases)
    phase, place, age_s = _place(spans)
    prefills = pl.col("prefill_tokens") > 0
    whole = pl.col("step_us").is_not_null()
    return recorded.filter(whole, phase < len(Phase)).select(
        pl.lit(repeat, dtype=pl.Int16).alias("repeat"),
        *("step_id", "t_ns"),
        phase.alias("phase"),
        *place,
        age_s.alias("age_s"),
        pl.col("scheduled").cast(pl.Int16).alias("batch"),
        pl.col("cache_size").alias("cache_blocks"),
        (pl.col("prefill_tokens") + pl.col("decode_tokens")).alias("tokens"),
        (~prefills & (pl.col("decode_tokens") > 0)).alias("decode_only"),
        prefills.alias("prefills"),
        *(*STEP_TIMES, "schedule_cpu_us", "thread_cpu_us", *methods, *calls),
        *(parts[name] for name in ("connector_us", "overhead_us", "worker_calls_us")),
    )


class Span(NamedTuple):
    """A phase, its place, when it begins, and when the cache was last reset by then.

    Without a phase, the driver probes the cache.
    """

    phase: Phase | None
    place: Place
    begins_ns: int
    reset_ns: int


def phase_spans(phases: list[PhaseStart]) -> list[Span]:
    """Find the phases in order.

    A phase after a reset begins at the reset itself: steps before it still see the full
    cache. The prompts that probe it belong to no phase.
    """
    spans, reset_ns = [], phases[0].start_ns if phases else 0
    for start in phases:
        phase = Phase.of(start.name)
        if start.probe_ns is not None:
            spans.append(Span(None, place_of(start.name), start.probe_ns, reset_ns))
        reset_ns = reset_ns if start.reset_ns is None else start.reset_ns
        if phase is not None:
            begins_ns = start.start_ns if start.reset_ns is None else start.reset_ns
            spans.append(Span(phase, place_of(start.name), begins_ns, reset_ns))
    return spans


def _place(spans: list[Span]) -> tuple[pl.Expr, list[pl.Expr], pl.Expr]:
    """Return phase, place and age of a step by when it began.

    The last phase that began at or before the step; len(Phase) stands for none.
    """
    phase, reset_ns = pl.lit(len(Phase), pl.UInt8), pl.col("t_ns")
    place = [pl.lit(0, kind) for kind in PLACE.values()]
    for span in spans:
        since = pl.when(pl.col("t_ns") >= span.begins_ns)
        number = len(Phase) if span.phase is None else int(span.phase)
        phase = since.then(pl.lit(number, pl.UInt8)).otherwise(phase)
        reset_ns = since.then(span.reset_ns).otherwise(reset_ns)
        place = [
            since.then(pl.lit(number, kind)).otherwise(before)
            for number, before, kind in zip(
                span.place, place, PLACE.values(), strict=True
            )
        ]
    named = [value.alias(name) for value, name in zip(place, PLACE, strict=True)]
    return phase, named, (pl.col("t_ns") - reset_ns) / 1e9


PLACE = {"hold": pl.UInt16, "level": pl.UInt8, "decoders": pl.UInt16}
THREAD = "thread "
READING_SCHEMA = pl.Schema(
    {
        "repeat": pl.Int16,
        **PLACE,
        **dict.fromkeys(("processes", "engine", "waited", "memory"), pl.Float64),
    }
)
NO_READINGS = pl.DataFrame(schema=READING_SCHEMA)
# The engine's thread, and threads that no connector started: vLLM's own, and the
# recorder's. Older recorders wrote no thread ids, and only names.
ENGINE = "MainThread"
OWN = rf"^{ENGINE}$|^vllm |^recorder "
MIB = 1_024


def read_holds(
    repeat: int, steps: pl.DataFrame, requests: Requests, threads: Path
) -> pl.DataFrame:
    """Tabulate what the driver read of the server at the edges of each hold.

    In us per engine step: CPU time of all `processes` and of the `engine`'s thread, how
    long that had `waited` for a core, and as `thread NAME` the CPU time of each thread
    of the engine's process that is not vLLM's own; threads of equal names count as one.
    `memory` is in MiB. Empty where the driver read
    nothing, and where `threads`, the recorder's file, is missing.
    """
    if not threads.is_file():
        return NO_READINGS
    engine, others = _threads(threads)
    began = steps["t_ns"].to_numpy()
    rows = []
    for span, first, last in _readings(requests):
        count = np.searchsorted(began, [first.t_ns, last.t_ns])
        if (made := int(count[1] - count[0])) < 1:
            continue
        spent_ns = dict.fromkeys(others.values(), 0)
        for thread, ns in last.threads.items():
            if thread in others:
                spent_ns[others[thread]] += ns - first.threads.get(thread, 0)
        per_step = {
            "processes": last.ns - first.ns,
            "engine": _of_thread(engine, first.threads, last.threads),
            "waited": _of_thread(engine, first.waited_ns, last.waited_ns),
            **{f"{THREAD}{name}": ns for name, ns in spent_ns.items()},
        }
        rows.append(
            dict(zip(PLACE, span.place, strict=True))
            | {
                name: None if ns is None else max(ns, 0) / 1e3 / made
                for name, ns in per_step.items()
            }
            | {"repeat": repeat}
            | {"memory": last.anonymous_kib and last.anonymous_kib / MIB}
        )
    return pl.DataFrame(rows, schema_overrides=READING_SCHEMA) if rows else NO_READINGS


def _of_thread(
    thread: int | None, first: dict[int, int], last: dict[int, int]
) -> int | None:
    if thread is None or thread not in last:
        return None
    return last[thread] - first.get(thread, 0)


def _readings(requests: Requests) -> Iterator[tuple[Span, CpuReading, CpuReading]]:
    """Yield each hold with the readings at its edges."""
    spans = [s for s in phase_spans(requests.phases) if s.phase is Phase.HOLD]
    for first, last in zip(requests.cpu[::2], requests.cpu[1::2], strict=False):
        held = [span for span in spans if span.begins_ns <= first.t_ns]
        if held:
            yield held[-1], first, last


def _threads(path: Path) -> tuple[int | None, dict[int, str]]:
    """Read the id of the engine's thread, and the names of those not vLLM's own."""
    engine, others = None, {}
    for record in read_lines(path, ThreadsHeader, ThreadTimes).records:
        for name in record.threads:
            kind, _, thread = name.rpartition("#")
            if thread.isdecimal():
                if kind == ENGINE:
                    engine = int(thread)
                elif not re.search(OWN, kind):
                    others[int(thread)] = kind
    return engine, others
