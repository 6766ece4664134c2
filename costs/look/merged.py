# SPDX-License-Identifier: Apache-2.0
"""What it takes to count the records of three hosts and to merge the counts.

And whether the result is that of one host that has them all.

    python -m costs.look.merged [--steps N] [--servers N] [--hosts N]

The hosts are folders here, one after the other: each in a process of its own, as on a
host of its own. The files are made up as by costs.look, and are deleted at the end.
Reads all JSON first, as a host does that nobody has looked at. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from costs.look.made_up_servers import write_servers
from costs.look.processes import taken_by
from lab.serving.supervise import exit_on_signals
from look.counts import ALPHA, quantiles
from look.instances import read_instances
from look.summed import Summed, read_summed

SHARES = (0.5, 0.9, 0.99, 0.999)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.look.merged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100_000_000, help="in all")
    parser.add_argument("--servers", type=int, default=63)
    parser.add_argument("--hosts", type=int, default=3)
    chosen = parser.parse_args()
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="costs_look.") as made:
        folder = Path(made)
        records = folder / "records"
        write_servers(records, chosen.steps, chosen.servers)
        hosts = spread_over(records, chosen.hosts)
        print(f"{chosen.steps:,} steps of {chosen.servers} servers\n")
        print("| | s | CPU s | peak MiB |\n|---|---:|---:|---:|", flush=True)
        files = [folder / f"{host.name}.parquet" for host in hosts]
        for host, file in zip(hosts, files, strict=True):
            print(f"| {host.name} | {reduce(host, file, host.name)} |", flush=True)
        told = [str(file) for file in files]
        merged = folder / "merged.parquet"
        taken = taken_by("look.merge", *told, "--out", str(merged)).cells
        print(f"| merge | {taken} |", flush=True)
        whole = folder / "whole.parquet"
        # What the hosts' looks kept would make it quicker.
        for kept in records.rglob("*.parquet"):
            kept.unlink()
        print(f"| all as one host | {reduce(records, whole, '')} |")
        size_mb = files[0].stat().st_size / 1e6
        print(f"\nA host's file has {size_mb:.1f} MB.\n")
        print_differences(read_summed(merged), read_summed(whole), hosts[0])


def spread_over(records: Path, count: int) -> list[Path]:
    """The servers' folders, moved into one for each host."""
    hosts = [records / f"host{number}" for number in range(count)]
    for number, server in enumerate(sorted(records.iterdir())):
        host = hosts[number % count]
        host.mkdir(exist_ok=True)
        server.rename(host / server.name)
    return hosts


def reduce(folder: Path, file: Path, host: str) -> str:
    told = [str(folder), "--out", str(file), "--host", host]
    return taken_by("look.reduce", *told).cells


def print_differences(merged: Summed, whole: Summed, host: Path) -> None:
    same = merged.counts.equals(whole.counts)
    print(f"Counts of merged and whole are {'equal' if same else 'NOT equal'}.\n")
    one = next(host.iterdir())
    (instance,), _ = read_instances(one)
    print("| quantiles furthest from the exact | % off |\n|---|---:|")
    for time in ("step_us", "connector_us", *instance.methods):
        counts = merged.counts.filter(pl.col("time") == time)
        exact = exact_quantiles(instance.steps[time], len(merged.servers))
        found = quantiles(counts, SHARES)
        off = max(
            abs(a - b) / b if b else abs(a) for a, b in zip(found, exact, strict=True)
        )
        print(f"| {time.removesuffix('_us')} | {off:.2%} |")
    print(f"\nStated: {ALPHA:.0%}.")


def exact_quantiles(us: pl.Series, copies: int) -> Sequence[float]:
    """Of so many servers alike: all have the same records."""
    last = len(us) * copies - 1
    at = [math.floor(last * share + 0.5) // copies for share in SHARES]
    return np.partition(us.to_numpy(), at)[at].astype(float).tolist()


if __name__ == "__main__":
    main()
