# SPDX-License-Identifier: Apache-2.0
"""Cost of direct_read to the engine that is read, per step: idle, and during reads.

At each size of the prefix cache four engines on the null model live side by side: two
with the no-op connector and two with direct_read, so that both have an A/A pair. Their
caches are full. The forward takes no time unless --forward-us says so: the engine's
thread then wants the GIL all the time, which is the worst case for the side channel.
Decode-only steps of 8 requests are timed in chunks, in an order drawn anew each round.
First each engine is timed alone. Then one engine with direct_read is timed while a
peer, in another process, reads prefixes of 64 blocks from it at several rates, or
floods it with lookups.

On a machine with few cores a peer slows the engine down by merely running. So each load
has a control: the peer puts the same load on the other engine, which does not step,
while this one does. What a load costs beyond its control is the cost of being read.

A round counts with its mean step, as a read delays few steps, and those much. Ratios
are of means within a round, then medians over the rounds, with 95 % percentile
bootstrap intervals over the rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import EngineProcess, WorkerProcess
from kvtax.engine.environment import DIRECT_READ_SECRET
from kvtax.proc.ports import reserve
from kvtax.report.markdown import DASH, number, table
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import ratio
from kvtax.verdict.aims import Aim, aims_table
from studies.results import (
    Variant,
    at_least,
    configure_rounds,
    engines,
    publish,
    quantiles,
    turns,
)

WORKER = "connectors.direct_read.bench.cost_worker"
BATCH = 8
SIZES = (20_000, 50_000, 200_000)
MIN_ROUNDS, MIN_STEPS = 6, 100
# What peers read, and as much beside it.
MIN_BLOCKS = 8_192
READ_BLOCKS = 64
NOOP, AGAIN = "no-op connector", "no-op again"
IDLE, IDLE_AGAIN = "direct_read, nobody reads", "direct_read again"
# Engines' connectors by what they measure when nobody is read.
DIRECT_READ = "direct_read_idle"
ENGINES = {NOOP: "noop", AGAIN: "noop", IDLE: DIRECT_READ, IDLE_AGAIN: DIRECT_READ}
# The most that being read is meant to add to a step.
AIM_SHARE = 0.02


class PeerLoad(NamedTuple):
    """Reads per second, or a flood of lookups with so many hashes each."""

    reads_per_s: float = 0.0
    flood_hashes: int = 0


# By name; the aim is for those with a stated rate.
READS_PER_S = " reads/s"
LOADS = {
    f"10{READS_PER_S}": PeerLoad(10.0),
    f"50{READS_PER_S}": PeerLoad(50.0),
    "reads, one after the other": PeerLoad(math.inf),
    "lookups of 256 hashes, one after the other": PeerLoad(flood_hashes=256),
    "lookups of 4,096 hashes, one after the other": PeerLoad(flood_hashes=4_096),
}


class Chunk(NamedTuple):
    """Times of some decode-only steps in us, and CPU seconds by thread."""

    step_us: Floats
    seconds: float
    cpu_s: dict[str, float]
    cached_blocks: int


class Reads(NamedTuple):
    """Reads or lookups of one load, and their times, (reads,).

    A load that only looks up has zeros in the last two.
    """

    offered_blocks: int
    valid_blocks: int
    seconds: float
    cpu_s: float
    lookup_us: Floats
    read_us: Floats
    validate_us: Floats


# By row: each round's chunk, and the load that was on.
Samples = dict[str, list[tuple[Chunk, Reads | None]]]


def control(name: str) -> str:
    """Name the row of the same load on another engine."""
    return f"{name}, of another engine"


class Served(msgspec.Struct):
    """Service to a load over all rounds: reads per second, valid share, ms per read."""

    per_s: float
    valid_share: float | None
    whole_ms: dict[str, float]
    reader_cpu_share: float


class Row(msgspec.Struct):
    """One condition at one cache size; a load also against its control.

    `step_us`: median over the rounds of their mean, quantiles over all steps.
    `cpu_share`: of a core, by kind of thread in the engine's process.
    """

    cached_blocks: int
    name: str
    rounds: int
    steps: int
    step_us: dict[str, float]
    to_noop: Estimate
    to_idle: Estimate
    to_control: Estimate | None
    cpu_share: dict[str, float]
    served: Served | None


class Size(msgspec.Struct):
    """Rows of one cache size, and us of the connector's calls in a tight loop."""

    blocks: int
    rows: list[Row]
    calls_us: dict[str, float]


class Bench:
    """Engines of one cache size and a peer that puts loads on them."""

    def __init__(
        self,
        processes: dict[str, EngineProcess],
        ports: dict[str, int],
        peer: WorkerProcess,
    ) -> None:
        self._processes, self._ports, self._peer = processes, ports, peer
        self._prompts = [process.ask("fill") for process in processes.values()][-1]

    def measure(self, rounds: int, steps: int) -> Samples:
        """Time all engines alone, and one of them under each load and its control."""
        conditions: list[tuple[str | None, str]] = [(None, name) for name in ENGINES]
        conditions += [
            (load, target) for load in LOADS for target in (IDLE, IDLE_AGAIN)
        ]
        rows = [*ENGINES, *LOADS, *map(control, LOADS)]
        samples: Samples = {name: [] for name in rows}
        for _, (load, target) in turns(conditions, rounds):
            if load is None:
                chunk = self._processes[target].ask("time_chunk", BATCH, steps)
                samples[target].append((chunk, None))
            else:
                self._begin(LOADS[load], target)
                chunk = self._processes[IDLE].ask("time_chunk", BATCH, steps)
                row = load if target == IDLE else control(load)
                samples[row].append((chunk, self._peer.ask("end")))
        return samples

    def _begin(self, load: PeerLoad, target: str) -> None:
        address = "127.0.0.1", self._ports[target]
        # Prompts that have not been used for long would be evicted.
        self._processes[target].ask("use_prompts")
        if load.flood_hashes:
            hashes = [block for prompt in self._prompts for block in prompt]
            self._peer.ask("begin_lookups", address, hashes[: load.flood_hashes])
        else:
            self._peer.ask("begin_reads", address, self._prompts, load.reads_per_s)

    def time_calls(self) -> dict[str, float]:
        """Time the connector's calls of a step, in us, by engine."""
        return {
            name: process.ask("time_calls", BATCH)
            for name, process in self._processes.items()
        }


def measure(
    blocks: int, rounds: int, steps: int, forward_us: int
) -> tuple[Size, dict[str, str]]:
    """Measure one cache size; return the hashes of the patches as well."""
    connectors = {name: load_connector(name) for name in set(ENGINES.values())}
    ports = {
        name: ports.direct_read
        for name, ports in zip(ENGINES, reserve(len(ENGINES)), strict=True)
    }
    variants = {
        name: Variant(
            [p for p in connectors[config].patches if not p.startswith("step_timing")],
            (config, str(blocks), str(ports[name])),
        )
        for name, config in ENGINES.items()
    }
    with (
        engines(WORKER, variants, forward_us=forward_us) as processes,
        tempfile.TemporaryDirectory() as folder,
        WorkerProcess(
            Path(folder),
            WORKER,
            "peer",
            str(READ_BLOCKS),
            env=os.environ | {"DIRECT_READ_SECRET": DIRECT_READ_SECRET},
        ) as peer,
    ):
        peer.wait_ready()
        bench = Bench(processes, ports, peer)
        rows = rows_of(bench.measure(rounds, steps))
        return Size(blocks, rows, bench.time_calls()), processes[IDLE].patch_hashes


def rows_of(samples: Samples) -> list[Row]:
    """Compute a row per condition, compared with its control if it has one."""
    controls = {control(name) for name in samples}
    return [_row(name, samples) for name in samples if name not in controls]


def _row(name: str, samples: Samples) -> Row:
    chunks = [chunk for chunk, _ in samples[name]]
    reads = [of_load for _, of_load in samples[name] if of_load is not None]
    steps_us = np.concatenate([chunk.step_us for chunk in chunks])
    seconds = sum(chunk.seconds for chunk in chunks)
    mean_us = mean_step_us(samples[name])

    def times(other: str) -> Estimate:
        return Estimate.of(ratio(mean_us, mean_step_us(samples[other])))

    return Row(
        cached_blocks=round(np.median([c.cached_blocks for c in chunks])),
        name=name,
        rounds=len(chunks),
        steps=len(steps_us),
        step_us={"mean": float(np.median(mean_us))} | quantiles(steps_us),
        to_noop=times(NOOP),
        to_idle=times(IDLE),
        to_control=times(control(name)) if control(name) in samples else None,
        cpu_share={
            kind: sum(chunk.cpu_s[kind] for chunk in chunks) / seconds
            for kind in chunks[0].cpu_s
        },
        served=served(reads) if reads else None,
    )


def mean_step_us(rounds: list[tuple[Chunk, Reads | None]]) -> Floats:
    """Return the mean step of each round."""
    return np.array([chunk.step_us.mean() for chunk, _ in rounds])


def served(loads: list[Reads]) -> Served:
    """Sum up what a load got in all rounds."""
    seconds = sum(load.seconds for load in loads)
    offered = sum(load.offered_blocks for load in loads)
    valid = sum(load.valid_blocks for load in loads)
    whole_us = np.concatenate(
        [load.lookup_us + load.read_us + load.validate_us for load in loads]
    )
    reads = any(load.read_us.any() for load in loads)
    return Served(
        per_s=len(whole_us) / seconds,
        valid_share=valid / offered if reads and offered else None,
        whole_ms=quantiles(whole_us / 1e3),
        reader_cpu_share=sum(load.cpu_s for load in loads) / seconds,
    )


def noise_floor(rows: list[Row]) -> float:
    """Return the far end of the A/A interval: the difference of equal engines."""
    again = {row.name: row for row in rows}
    equal = again[AGAIN].to_noop, again[IDLE_AGAIN].to_idle
    return max(abs(edge - 1) for of in equal for edge in (of.low, of.high))


def judged(rows: list[Row]) -> str:
    """Judge idle against the noise floor; each rate of reads against its control."""
    aims = []
    for row in rows:
        if row.name == IDLE:
            what, most = f"{IDLE}: step, to no-op", 1 + noise_floor(rows)
            aim = Aim(what=what, at_most=most, unit="(the noise floor)")
            aims.append((aim, row.to_noop))
        elif row.to_control is not None and row.name.endswith(READS_PER_S):
            what = f"{row.name}: step, to its control"
            aims.append((Aim(what=what, at_most=1 + AIM_SHARE), row.to_control))
    return aims_table(aims, ".3f")


def cost_of_one_ms(row: Row) -> str:
    """Compute ms that one read costs the engine: lost share of its time over rate."""
    assert row.to_control is not None and row.served is not None
    if not row.served.per_s:
        return "no read in these steps"
    ms_per_s = 1e3 / row.served.per_s

    def lost(times: float) -> float:
        return ms_per_s * (1 - 1 / times)

    to_control = row.to_control
    ends = lost(to_control.low), lost(to_control.high)
    return f"{Estimate(lost(to_control.value), ends):,.2f}"


def steps_table(rows: list[Row]) -> str:
    """Tabulate the steps of each condition."""
    body = []
    for row in rows:
        times = row.to_noop, row.to_idle, row.to_control
        body.append(
            [row.name, *(number(row.step_us[q]) for q in ("mean", "p50", "p99"))]
            + [DASH if estimate is None else f"{estimate:.3f}" for estimate in times]
            + [f"{100 * share:.1f}" for share in row.cpu_share.values()]
        )
    head = ["", "step us, mean", "p50", "p99", "to no-op", "to idle", "to its control"]
    return table([*head, *(f"CPU %: {kind}" for kind in rows[0].cpu_share)], body)


def served_table(rows: list[Row]) -> str:
    """Tabulate what each load got, and what it cost the engine."""
    body = []
    for row in rows:
        if (load := row.served) is None:
            continue
        valid = DASH if load.valid_share is None else f"{100 * load.valid_share:.2f}"
        cells = [row.name, number(load.per_s), cost_of_one_ms(row), valid]
        cells += [number(load.whole_ms[q], 2) for q in ("p50", "p99", "max")]
        body.append([*cells, f"{100 * load.reader_cpu_share:.1f}"])
    head = ["", "per second", "ms that one costs the engine", "% of blocks valid"]
    head += ["lookup, read, validate ms p50", "p99", "max", "reader's CPU %"]
    return table(head, body)


def report(sizes: list[Size], forward_us: int) -> list[str]:
    """Return the parts of the page."""
    first = sizes[0].rows[0]
    parts = [
        f"Decode-only steps, batch {BATCH}, a forward of {forward_us} us. "
        f"{first.rounds} rounds, {first.steps:,} steps per row. Ratios are of mean "
        "steps. A control is the same load on another engine, so a ratio to it does "
        "not contain what the peer takes by merely running."
    ]
    for size in sizes:
        least = min(row.cached_blocks for row in size.rows)
        parts.append(f"## {size.blocks:,} blocks ({least:,} cached or more)")
        parts += [steps_table(size.rows), judged(size.rows), served_table(size.rows)]
    parts.append("## The connector's calls of a step, in a tight loop, us")
    rows = [
        [f"{size.blocks:,}", *(number(us, 2) for us in size.calls_us.values())]
        for size in sizes
    ]
    return [*parts, table(["cached blocks", *sizes[0].calls_us], rows)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench direct_read_cost`."""
    configure_rounds(parser, "direct_read_cost", 10, MIN_ROUNDS)
    parser.add_argument(
        "--steps", type=at_least(MIN_STEPS), default=2_000, help="per chunk"
    )
    parser.add_argument(
        "--blocks",
        type=at_least(MIN_BLOCKS),
        action="append",
        help=f"cached (default: {SIZES})",
    )
    parser.add_argument("--forward-us", type=int, default=0, help="of the null model")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    sizes, forward_us = [], arguments.forward_us
    for blocks in arguments.blocks or SIZES:
        size, hashes = measure(blocks, arguments.rounds, arguments.steps, forward_us)
        sizes.append(size)
    parts = report(sizes, forward_us)
    results = {"forward_us": forward_us, "sizes": sizes}
    return publish("direct_read_cost", arguments.out, parts, results, hashes)
