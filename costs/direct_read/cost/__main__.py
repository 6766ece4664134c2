# SPDX-License-Identifier: Apache-2.0
"""What direct_read costs the engine that is read: per step, idle and while peers read.

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
bootstrap intervals over the rounds. Prints Markdown and writes it to --out, and the
rows to a JSON file beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from costs.direct_read.cost.report import document
from costs.direct_read.cost.rows import (
    AGAIN,
    IDLE,
    IDLE_AGAIN,
    NOOP,
    Calls,
    Row,
    Samples,
    control,
    rows_of,
)
from costs.results import write_result
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.engine_process import EngineProcess, WorkerProcess
from lab.serving.ports import reserve
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED

BATCH = 8
SIZES = (20_000, 50_000, 200_000)
MIN_ROUNDS, MIN_STEPS = 6, 100
# What peers read, and as much beside it.
MIN_BLOCKS = 8_192
DIRECT_READ = "direct_read_idle"
# Engine processes by what they measure when nobody is read.
ENGINES = {NOOP: "noop", AGAIN: "noop", IDLE: DIRECT_READ, IDLE_AGAIN: DIRECT_READ}


class PeerLoad(NamedTuple):
    """Reads per second, or a flood of lookups with so many hashes each."""

    name: str
    reads_per_s: float = 0.0
    flood_hashes: int = 0


LOADS = (
    PeerLoad("10 reads/s", 10.0),
    PeerLoad("50 reads/s", 50.0),
    PeerLoad("reads, one after the other", math.inf),
    PeerLoad("lookups of 256 hashes, one after the other", flood_hashes=256),
    PeerLoad("lookups of 4,096 hashes, one after the other", flood_hashes=4_096),
)


class Processes:
    """Engines of one cache size and a peer; `samples` gets what is measured."""

    def __init__(
        self, folder: Path, stack: ExitStack, blocks: int, forward_us: int
    ) -> None:
        connectors = {name: load_connector(name) for name in set(ENGINES.values())}
        env = connectors[DIRECT_READ].env
        self._ports = {
            engine: ports.direct_read
            for engine, ports in zip(ENGINES, reserve(len(ENGINES)), strict=True)
        }
        self._engines = {
            name: stack.enter_context(
                EngineProcess(
                    folder / str(number),
                    "costs.direct_read.cost.worker",
                    [
                        patch
                        for patch in connectors[connector].patches
                        if not patch.startswith("step_timing")
                    ],
                    *(connector, str(blocks), str(self._ports[name])),
                    env=env,
                    forward_us=forward_us,
                )
            )
            for number, (name, connector) in enumerate(ENGINES.items())
        }
        self._peer = stack.enter_context(
            WorkerProcess(
                folder / "peer",
                "costs.direct_read.cost.peer",
                "64",
                env=os.environ | env,
            )
        )
        for process in (*self._engines.values(), self._peer):
            process.wait_ready()
        self._prompts = [engine.ask("fill") for engine in self._engines.values()][-1]
        self.patch_hashes = self._engines[IDLE].patch_hashes
        self._order = random.Random(SEED)
        names = [load.name for load in LOADS]
        rows = [*ENGINES, *names, *map(control, names)]
        self.samples: Samples = {name: [] for name in rows}

    def measure(self, rounds: int, steps: int) -> None:
        turns = [(None, name) for name in ENGINES]
        turns += [(load, target) for load in LOADS for target in (IDLE, IDLE_AGAIN)]
        for _ in range(rounds):
            for load, name in self._order.sample(turns, len(turns)):
                if load is None:
                    chunk = self._engines[name].ask("time_chunk", BATCH, steps)
                    self.samples[name].append((chunk, None))
                else:
                    self._measure_under(load, name, steps)

    def _measure_under(self, load: PeerLoad, target: str, steps: int) -> None:
        """One engine's steps while a load is on it, or on the other as a control."""
        address = "127.0.0.1", self._ports[target]
        # Prompts that have not been used for long would be evicted.
        self._engines[target].ask("use_prompts")
        if load.flood_hashes:
            hashes = [block for prompt in self._prompts for block in prompt]
            self._peer.ask("begin_lookups", address, hashes[: load.flood_hashes])
        else:
            self._peer.ask("begin_reads", address, self._prompts, load.reads_per_s)
        chunk = self._engines[IDLE].ask("time_chunk", BATCH, steps)
        name = load.name if target == IDLE else control(load.name)
        self.samples[name].append((chunk, self._peer.ask("end")))

    def time_calls(self) -> dict[str, float]:
        """us per step of the connector's calls, by engine."""
        return {
            name: engine.ask("time_calls", BATCH)
            for name, engine in self._engines.items()
        }


def measure(
    sizes: list[int], rounds: int, steps: int, forward_us: int
) -> tuple[list[Row], list[Calls], dict[str, str]]:
    """All sizes, one after the other. Raises RuntimeError if a process fails."""
    rows, calls = [], []
    for blocks in sizes:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            processes = Processes(Path(folder), stack, blocks, forward_us)
            processes.measure(rounds, steps)
            rows += rows_of(processes.samples)
            calls.append(Calls(blocks, processes.time_calls()))
            hashes = processes.patch_hashes
    return rows, calls, hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.direct_read.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2_000, help="per chunk")
    parser.add_argument(
        "--blocks", type=int, action="append", help=f"cached (default: {SIZES})"
    )
    parser.add_argument("--forward-us", type=int, default=0, help="of the null model")
    parser.add_argument("--out", type=Path, default=Path("runs/direct_read_cost.md"))
    arguments = parser.parse_args()
    if arguments.rounds < MIN_ROUNDS or arguments.steps < MIN_STEPS:
        parser.error(f"at least {MIN_ROUNDS} rounds and {MIN_STEPS} steps")
    sizes = arguments.blocks or list(SIZES)
    if min(sizes) < MIN_BLOCKS:
        parser.error(f"at least {MIN_BLOCKS} blocks")

    exit_on_signals()
    try:
        rows, calls, patch_hashes = measure(
            sizes, arguments.rounds, arguments.steps, arguments.forward_us
        )
    except RuntimeError as error:
        sys.exit(str(error))
    facts = provenance.collect(patch_hashes, "python -m costs.direct_read.cost")
    facts["forward_us"] = arguments.forward_us
    text = document(rows, calls, facts)
    write_result(arguments.out, facts | {"rows": rows, "calls": calls}, text)
    print(text)


if __name__ == "__main__":
    main()
