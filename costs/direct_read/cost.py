# SPDX-License-Identifier: Apache-2.0
"""What direct_read costs the engine that is read: per step, idle and while peers read.

At each size of the prefix cache four engines on the null model live side by side: two
with the no-op connector and two with direct_read, so that both have an A/A pair. Their
caches are full, and the forward takes no time unless --forward-us says so: the engine's
thread then wants the GIL all the time, the worst case for whom it is shared with.
Decode-only steps of 8 requests are timed in chunks, in an order drawn anew each round:
each engine by itself; and one of direct_read's while another process reads prefixes of
64 blocks from it, at several rates, or floods it with lookups.

On a machine with few cores a reader takes time from the engine by its mere running. So
each load has a control: the same process puts it on the other engine, which does not
step, while this one does. What a load costs beyond its control is what the engine pays
for being read.

A round counts with its mean step, as a read hits few steps and those hard. Ratios are
of means within a round, then medians over the rounds, with 95 % percentile bootstrap
intervals over the rounds. Prints Markdown and writes it to --out, and the rows to a
JSON file beside it.
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
from typing import Any, NamedTuple

import msgspec

from costs.direct_read.report import document
from costs.direct_read.rows import (
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
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.engine_process import EngineProcess, WorkerProcess
from lab.serving.ports import reserve
from lab.serving.supervise import exit_on_signals

SEED = 20_240_731
BATCH = 8
SIZES = (20_000, 50_000, 200_000)
MIN_ROUNDS, MIN_STEPS = 6, 100
# What peers read, and as much beside it.
MIN_BLOCKS = 8_192
DIRECT_READ = "direct_read_idle"
# Engine processes by what they measure when nobody is read.
ENGINES = {NOOP: "noop", AGAIN: "noop", IDLE: DIRECT_READ, IDLE_AGAIN: DIRECT_READ}


class Case(NamedTuple):
    """A load: reads a second, or hashes a lookup of a flood."""

    name: str
    reads_per_s: float = 0.0
    flood_hashes: int = 0


CASES = (
    Case("10 reads/s", 10.0),
    Case("50 reads/s", 50.0),
    Case("reads, one after the other", math.inf),
    Case("lookups of 256 hashes, one after the other", flood_hashes=256),
    Case("lookups of 4,096 hashes, one after the other", flood_hashes=4_096),
)


class Bench:
    """The processes of one size; `samples` gets what is measured."""

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
                    "costs.direct_read.cost_worker",
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
        self._load = stack.enter_context(
            WorkerProcess(
                folder / "load",
                "costs.direct_read.load",
                "64",
                env=os.environ | env,
            )
        )
        for process in (*self._engines.values(), self._load):
            process.wait_ready()
        self._prompts = [engine.ask("fill") for engine in self._engines.values()][-1]
        self.patch_hashes = self._engines[IDLE].patch_hashes
        self._order = random.Random(SEED)
        names = [case.name for case in CASES]
        rows = [*ENGINES, *names, *map(control, names)]
        self.samples: Samples = {name: [] for name in rows}

    def measure(self, rounds: int, steps: int) -> None:
        loads = [(case, target) for case in CASES for target in (IDLE, IDLE_AGAIN)]
        for _ in range(rounds):
            for case, name in self._order.sample(
                [(None, name) for name in ENGINES] + loads, len(ENGINES) + len(loads)
            ):
                if case is None:
                    chunk = self._engines[name].ask("time_chunk", BATCH, steps)
                    self.samples[name].append((chunk, None))
                else:
                    self._measure_under(case, name, steps)

    def _measure_under(self, case: Case, target: str, steps: int) -> None:
        """One engine's steps while a load is on it, or on the other for control."""
        address = "127.0.0.1", self._ports[target]
        # Prompts that have not been used for long would be evicted.
        self._engines[target].ask("use_prompts")
        if case.flood_hashes:
            hashes = [block for prompt in self._prompts for block in prompt]
            self._load.ask("begin_lookups", address, hashes[: case.flood_hashes])
        else:
            self._load.ask("begin_reads", address, self._prompts, case.reads_per_s)
        chunk = self._engines[IDLE].ask("time_chunk", BATCH, steps)
        name = case.name if target == IDLE else control(case.name)
        self.samples[name].append((chunk, self._load.ask("end")))

    def time_calls(self) -> dict[str, float]:
        """us of the connector's calls of a step, by engine."""
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
            bench = Bench(Path(folder), stack, blocks, forward_us)
            bench.measure(rounds, steps)
            rows += rows_of(bench.samples)
            calls.append(Calls(blocks, bench.time_calls()))
            hashes = bench.patch_hashes
    return rows, calls, hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.direct_read.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2_000, help="a chunk")
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
    facts: dict[str, Any] = provenance.collect(patch_hashes)
    facts["command_line"] = " ".join(
        ["python -m costs.direct_read.cost", *sys.argv[1:]]
    )
    facts["forward_us"] = arguments.forward_us
    text = document(rows, calls, facts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    everything = facts | {"rows": rows, "calls": calls}
    encoded = msgspec.json.format(msgspec.json.encode(everything), indent=1)
    arguments.out.with_suffix(".json").write_bytes(encoded + b"\n")
    print(text)


if __name__ == "__main__":
    main()
