# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the analysis of 10 million steps.

A run of one trial is written to a temporary folder, with an engine and a worker record
per step (4.1 GB at 10 million). A fresh process then does what `kvtax sweep --report`
does before it draws: it loads, joins, filters, and computes levels, slopes and the
verdict. Its times and peak resident memory come from the kernel. Prints Markdown. Exits
with 1 at 10 s or 2 GB: our promise for 10 million steps on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.results import USAGE_HEAD, usage_of
from kvtax.cost.analysis import analyse
from kvtax.cost.trials import load_run
from kvtax.records.files import LineFile, write_document
from kvtax.records.made_up import FIRST_NS, STEP_NS, step_columns, write_lines
from kvtax.records.requests import DriverEnd, Phase, PhaseStart, RequestsHeader
from kvtax.records.run import PlanEntry, RunRecord, TrialRecord
from kvtax.records.steps import EngineHeader, WorkerHeader

# 2,000 MB.
MOST_S, MOST_MIB = 10.0, 1_953.0
BATCH_RECORDS = 1_000_000
# Share of the steps that are decode-only.
DECODE_ONLY = (0.75, 1.0)
# A fifth of the steps is growth; the others are holds.
GROWTH = 0.2
BLOCKS, DECODERS, PASSES = 17_500, 8, 6
SHARES = np.array([0.0, 0.3, 0.6, 0.92, 1.0])
HOLDS = PASSES * len(SHARES)


def write_files(trial: Path, count: int) -> None:
    """Write engine and worker records of `count` steps: growth, then holds."""
    rng = np.random.default_rng(0)
    headers = {
        "engine_step.jsonl": EngineHeader(pid=1),
        "worker_step.r0.jsonl": WorkerHeader(rank=0),
    }
    for name, header in headers.items():
        columns = engine_columns if "engine" in name else worker_columns
        batches = (
            pl.DataFrame(
                columns(rng, np.arange(at, min(at + BATCH_RECORDS, count)), count)
            )
            for at in range(0, count, BATCH_RECORDS)
        )
        write_lines(trial / name, header, batches)


def hold_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Return the number of the hold of each step; below 0 in the growth phase."""
    return np.floor((ids / count - GROWTH) / (1 - GROWTH) * HOLDS).astype(int)


def phases(count: int) -> Iterator[PhaseStart]:
    """Yield the growth phase and the holds, each pass after a reset."""
    yield PhaseStart(Phase.GROWTH.label, 0)
    holds = hold_of(np.arange(count), count)
    for hold, first in enumerate(np.searchsorted(holds, np.arange(HOLDS))):
        start_ns = FIRST_NS + int(first) * STEP_NS
        number, level = divmod(hold, len(SHARES))
        reset_ns = None if level else start_ns
        yield PhaseStart(Phase.HOLD.at(number, level), start_ns, reset_ns)


def engine_columns(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Return columns of engine records, one in ten a prefill."""
    n = len(ids)
    hold = hold_of(ids, count)
    batch = np.where(hold < 0, rng.integers(1, 9, n), DECODERS)
    grown = ids / (GROWTH * count)
    cached = np.where(hold < 0, grown, SHARES[hold % len(SHARES)])
    noise = rng.exponential(8, n)
    return step_columns(
        "engine",
        ids,
        schedule_us=(46 + 2 * batch + noise).round(3),
        build_meta_us=(1.2 + rng.exponential(0.1, n)).round(3),
        step_us=(252 + noise + rng.exponential(40, n)).round(3),
        running=batch,
        scheduled=batch,
        prefill_tokens=np.where(rng.random(n) < 0.1, 512, 0),
        decode_tokens=batch,
        cache_size=(BLOCKS * cached).astype(int),
        free_blocks=np.full(n, 1_000),
        update_us=(33 + rng.exponential(4, n)).round(3),
    )


def worker_columns(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Return columns of worker records with all connector methods."""
    n = len(ids)
    return step_columns(
        "worker",
        ids,
        execute_model_us=(180 + rng.exponential(8, n)).round(3),
        bind_us=(0.3 + rng.exponential(0.1, n)).round(3),
        start_load_kv_us=(0.6 + rng.exponential(0.1, n)).round(3),
        wait_for_save_us=(0.2 + rng.exponential(0.1, n)).round(3),
        get_finished_us=(70 + rng.exponential(8, n)).round(3),
    )


def write_run(folder: Path, count: int) -> None:
    """Write a run folder of one trial."""
    trial = folder / "plain" / "r0"
    trial.mkdir(parents=True)
    ladder = {"levels": SHARES.tolist(), "passes": PASSES, "decoders": DECODERS}
    run = RunRecord(plan=[PlanEntry("plain", 0)], profile={"load": {"ladder": ladder}})
    write_document(folder / "run.json", run)
    write_document(
        trial / "trial.json",
        TrialRecord(
            config="plain", repeat=0, status="ok", num_blocks=BLOCKS, block_size=16
        ),
    )
    with LineFile(trial / "requests.jsonl", RequestsHeader(scheduled=0)) as file:
        for phase in phases(count):
            file.append(phase)
        file.append(DriverEnd(scheduled=0, ok=0, failed=0, cancelled=0, valid=True))
    write_files(trial, count)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench report`."""
    parser.add_argument("--records", type=int, default=10_000_000, help="of each kind")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    count = arguments.records
    with tempfile.TemporaryDirectory(prefix="costs_report.") as folder:
        write_run(Path(folder), count)
        usage = usage_of("benchmarks.report", folder)
    print(f"{USAGE_HEAD}\n| {count:,} steps | {usage} |")
    return int(usage.wall_s >= MOST_S or usage.peak_mib >= MOST_MIB)


def main() -> None:
    """Analyse a run of `write_run`; end with an error unless the result is right."""
    run, trials = load_run(Path(sys.argv[1]))
    entry = analyse(run, trials, None).document.configs["plain"]
    low, high = (share * trials[0].engine_steps for share in DECODE_ONLY)
    assert low < entry.n_decode_steps < high
    assert entry.verdict_of["schedule"] == "flat"
    assert entry.held["schedule"].cache_blocks == [round(s * BLOCKS) for s in SHARES]


if __name__ == "__main__":
    main()
