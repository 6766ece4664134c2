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
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.made_up_servers import write_servers
from benchmarks.results import USAGE_HEAD, usage_of
from kvtax.look.instances import read_instances
from kvtax.look.totals import ALPHA, StepTotals, quantiles, read_totals

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
    for time in ("step_us", "connector_us", *instance.methods):
        counts = merged.counts.filter(pl.col("time") == time)
        exact = exact_quantiles(instance.steps[time], len(merged.servers))
        off = max(
            abs(a - b) / b if b else abs(a)
            for a, b in zip(quantiles(counts, SHARES), exact, strict=True)
        )
        print(f"| {time.removesuffix('_us')} | {off:.2%} |")
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
