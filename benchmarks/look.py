# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `kvtax look` for the records of many servers.

Makes up records in a temporary folder, which is deleted at the end: at 100 million
steps of 64 servers 0.7 GB, and 7 GB more of what a first look keeps. Looks at them
twice, each time in a process of its own, whose times and peak resident memory come from
the kernel.

With --hosts, counts a part of the servers at a time, as a host does with
`kvtax look --summary`, and merges the counts: are they those of one host that has all
records? The hosts are folders, one after the other, and all JSON is read. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.results import USAGE_HEAD, usage_of
from kvtax.look.instances import read_instances
from kvtax.look.totals import ALPHA, StepTotals, quantiles, read_totals
from kvtax.records.requests import EngineRequestHeader
from kvtax.records.steps import EngineHeader, WorkerHeader
from tests.harness.made_up import FIRST_NS, step_columns, write_lines

SHARES = (0.5, 0.9, 0.99, 0.999)


def look(name: str, *arguments: object) -> None:
    """Run `kvtax look` and print its row of the table."""
    print(f"| {name} | {usage_of('look', *map(str, arguments))} |", flush=True)


def look_twice(folder: Path, records: Path) -> None:
    """Look at all records, and at what the first look kept."""
    page = folder / "report.html"
    for name in ("first, of JSON", "second, of what the first kept"):
        look(name, records, "--out", page)
    print(f"\nThe page has {page.stat().st_size / 1e6:.1f} MB.")


def look_on_hosts(folder: Path, records: Path, count: int) -> None:
    """Count on `count` hosts and merge; compare with the counts of one host."""
    hosts = spread_over(records, count)
    files = [folder / f"{host.name}.parquet" for host in hosts]
    for host, file in zip(hosts, files, strict=True):
        look(host.name, host, "--summary", file, "--host", host.name)
    merged, whole = folder / "merged.parquet", folder / "whole.parquet"
    look("merge", *files, "--summary", merged)
    # What the hosts' looks kept would make it quicker.
    for cached in records.rglob("*.parquet"):
        cached.unlink()
    look("all as one host", records, "--summary", whole, "--host", "")
    print(f"\nA host's file has {files[0].stat().st_size / 1e6:.1f} MB.\n")
    print_differences(read_totals(merged), read_totals(whole), hosts[0])


def spread_over(records: Path, count: int) -> list[Path]:
    """Move the servers' folders into one folder per host."""
    hosts = [records / f"host{number}" for number in range(count)]
    for number, server in enumerate(sorted(records.iterdir())):
        host = hosts[number % count]
        host.mkdir(exist_ok=True)
        server.rename(host / server.name)
    return hosts


def print_differences(merged: StepTotals, whole: StepTotals, host: Path) -> None:
    """Print whether the counts are equal, and how far off their quantiles are."""
    same = merged.counts.equals(whole.counts)
    print(f"Counts of merged and whole are {'equal' if same else 'NOT equal'}.\n")
    (instance,), _ = read_instances(next(host.iterdir()))
    print("| quantiles furthest from the exact | % off |\n|---|---:|")
    for column in ("step_us", "connector_us", *instance.methods):
        counts = merged.counts.filter(pl.col("time") == column)
        exact = exact_quantiles(instance.steps[column], len(merged.servers))
        off = max(
            abs(a - b) / b if b else abs(a)
            for a, b in zip(quantiles(counts, SHARES), exact, strict=True)
        )
        print(f"| {column.removesuffix('_us')} | {off:.2%} |")
    print(f"\nStated: {ALPHA:.0%}.")


def exact_quantiles(us: pl.Series, copies: int) -> Sequence[float]:
    """Compute exact quantiles over `copies` servers with identical records."""
    last = len(us) * copies - 1
    at = [math.floor(last * share + 0.5) // copies for share in SHARES]
    return np.partition(us.to_numpy(), at)[at].astype(float).tolist()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench look`."""
    parser.add_argument("--steps", type=int, default=100_000_000, help="in all")
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--hosts", type=int, help="count on so many hosts, and merge")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="costs_look.") as made:
        folder, records = Path(made), Path(made) / "records"
        write_servers(records, arguments.steps, arguments.servers)
        print(f"{arguments.steps:,} steps of {arguments.servers} servers\n")
        print(USAGE_HEAD, flush=True)
        if arguments.hosts:
            look_on_hosts(folder, records, arguments.hosts)
        else:
            look_twice(folder, records)
    return 0


BATCH_STEPS = 1_000_000
STEP_NS = 320_000
# A request is in so many steps, and a new one comes every so many.
STEPS_OF_REQUEST, STEPS_PER_REQUEST = 200, 50
CACHE_BLOCKS = 17_500
# Long ago enough that nobody takes the server for one that still writes.
AGE_S = 3_600
# One step in so many has the CPU clocks.
CPU_EVERY = 16
# What the recorder times of Mooncake: once per step, or once per request.
PER_REQUEST = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
)
METHODS = ["build_connector_meta", *PER_REQUEST]
WORKER_METHODS = [
    *("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_finished")
]


def write_servers(folder: Path, steps: int, servers: int) -> None:
    """Write `steps` steps in all, in `servers` folders of equal records."""
    first = folder / "server00"
    first.mkdir(parents=True)
    _write(first, steps // servers)
    for path in first.iterdir():
        then = time.time() - AGE_S
        os.utime(path, (then, then))
    for number in range(1, servers):
        other = folder / f"server{number:02}"
        other.mkdir()
        for path in first.iterdir():
            os.link(path, other / path.name)


def _write(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    known: dict[str, Any] = {"vllm_version": "0.18.1", "boot_id": "made-up"}
    files = {
        "engine_step": (EngineHeader(methods=METHODS, **known), _engine, 1),
        "worker_step.r0": (
            WorkerHeader(methods=WORKER_METHODS, **known),
            _worker,
            1,
        ),
        "engine_request": (EngineRequestHeader(**known), _request, STEPS_PER_REQUEST),
    }
    for name, (header, columns, every) in files.items():
        batches = (
            pl.DataFrame(
                columns(rng, np.arange(at, min(at + BATCH_STEPS, count), every), count)
            )
            for at in range(0, count, BATCH_STEPS)
        )
        write_lines(folder / f"{name}.jsonl", header, batches)


def _engine(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of engine records, one in ten a prefill; |cache| grows, and is reset."""
    n = len(ids)
    batch = rng.integers(1, 9, n)
    schedule_us = (46 + 2 * batch + rng.exponential(8, n)).round(3)
    blocks = ids % max(count // 4, 1) * 4 * CACHE_BLOCKS // count
    with_cpu = pl.Series(rng.integers(0, CPU_EVERY, n) == 0)
    arrives = pl.Series(ids % STEPS_PER_REQUEST == 0)
    calls = pl.DataFrame({name: rng.exponential(9, n).round(3) for name in PER_REQUEST})
    return step_columns(
        "engine",
        ids,
        t_ns=FIRST_NS + ids * STEP_NS,
        schedule_us=schedule_us,
        build_meta_us=(1.2 + rng.exponential(0.1, n)).round(3),
        step_us=(270 + rng.exponential(8, n)).round(3),
        running=batch,
        scheduled=batch,
        prefill_tokens=np.where(rng.random(n) < 0.1, 512, 0),
        decode_tokens=batch,
        cache_size=blocks,
        free_blocks=18_000 - 200 * batch,
        preemptions=[None] * n,
        update_us=(23 + rng.exponential(4, n)).round(3),
        schedule_cpu_us=_only(with_cpu, schedule_us),
        update_cpu_us=_only(with_cpu, (23 + rng.exponential(4, n)).round(3)),
        thread_cpu_us=_only(with_cpu, (200 + rng.exponential(8, n)).round(3)),
        connector_self_us=_only(arrives, calls.to_struct()),
    )


def _worker(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of worker records."""
    n = len(ids)
    return step_columns(
        "worker",
        ids,
        t_ns=FIRST_NS + ids * STEP_NS + 80_000,
        execute_model_us=(160 + rng.exponential(4, n)).round(3),
        bind_us=(0.3 + rng.exponential(0.1, n)).round(3),
        start_load_kv_us=(0.6 + rng.exponential(0.1, n)).round(3),
        wait_for_save_us=(0.2 + rng.exponential(0.1, n)).round(3),
        get_finished_us=(70 + rng.exponential(8, n)).round(3),
    )


def _only(rows: pl.Series, values: np.ndarray | pl.Series) -> pl.Series:
    """Return `values` in those rows; nothing was recorded in the others."""
    one = pl.Series(values)
    return pl.select(pl.when(rows).then(one)).to_series()


def _request(rng: np.random.Generator, ids: np.ndarray, count: int) -> dict:
    """Columns of engine_request records, one in twenty preempted."""
    n = len(ids)
    last = np.minimum(ids + STEPS_OF_REQUEST, count - 1)
    token = np.minimum(ids + 1, last)
    preempted = rng.random(n) < 0.05
    return {
        "id": [f"{number:016x}" for number in ids],
        "arrival_ns": FIRST_NS + ids * STEP_NS - rng.integers(0, 10**6, n),
        "prompt_tokens": rng.integers(1, 9_000, n),
        "before_engine_us": rng.exponential(800, n).round(1),
        "first_step": ids,
        "first_token_step": token,
        "last_step": last,
        "finished_ns": FIRST_NS + last * STEP_NS + 250_000,
        "finish_reason": ["length"] * n,
        "cached_tokens": rng.integers(0, 9_000, n),
        "external_tokens": np.zeros(n, int),
        "output_tokens": last - token + 1,
        "preemptions": preempted.astype(int),
        "preempted_steps": [
            [int(one) + 10, int(one) + 20] if there and one + 20 < count else []
            for one, there in zip(ids, preempted, strict=True)
        ],
    }
