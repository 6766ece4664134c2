# SPDX-License-Identifier: Apache-2.0
"""What of a connector's work do users feel, and does `look` find it?

A null device computes beside the host, so vLLM's asynchronous scheduling works as on a
GPU. Two questions:

- A known delay in one method after the other, at several loads, with and without
  asynchronous scheduling: is what `look` calls exposed in that method what TPOT rises
  by?
- What do the hash walk, upstream's Mooncake and the fixed one add to TPOT and TTFT, at
  a full cache and several loads?

All cells of a round are measured in turn, in an order drawn anew. Differences are
within a round; intervals are 95 %, from resampling rounds. Prints Markdown and writes
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import polars as pl

from costs.exposure.report import Cell, Seen, report
from costs.results import write_result
from lab.records.device import read_device_steps
from lab.serving import provenance
from lab.serving.connector import load_connector
from lab.serving.engine_process import EngineProcess
from lab.serving.settings import CPU_ENGINE
from lab.serving.supervise import exit_on_signals
from lab.stats.estimate import SEED
from look.exposed import exposed
from look.instances import read_instances

FORWARD_US = 7_000
# What a step takes besides, roughly; only to say what a load of 100 % is.
HOST_US = 1_500
MAX_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 48
LOADS = (0.25, 0.5, 0.9, 1.0)
DELAYS_US = (0.0, 200.0, 500.0, 1_000.0, 2_000.0)
METHODS = {
    "build_connector_meta": "scheduler",
    "update_connector_output": "scheduler",
    "start_load_kv": "worker",
    "get_finished": "worker",
}
MODES = ("sync", "async")
SIZES = {"num_blocks": 18_000, "max_requests": MAX_REQUESTS}
FULL_BLOCKS = 17_000
DELAYING = {
    "kv_connector": "DelayingConnector",
    "kv_connector_module_path": "costs.exposure.delaying",
    "kv_role": "kv_both",
}
CONFIGS = [
    "noop",
    "mooncake_both",
    "mooncake_both_hash_sync",
    "mooncake_both_fixed",
]
RECORDING = ["step_timing_v1", "step_timing_v2"]
# A forward that takes no longer than a slow host's work.
SHORT_FORWARD_US = 2_000


class Planned(NamedTuple):
    """A cell, and how it is asked for."""

    cell: Cell
    engine: str
    delay_us: dict[str, float]


class Bench:
    """An engine per config and way of scheduling; one at a time is loaded."""

    def __init__(self, folder: Path, stack: ExitStack, forward_us: int) -> None:
        self._folder, self._stack = folder, stack
        self._forward_us = forward_us
        self._engines: dict[str, EngineProcess] = {}
        self.hashes: dict[str, str] = {}

    def start(self, name: str, mode: str, transfer: dict, patches: list[str]) -> str:
        """The engine's name; it is ready."""
        engine = f"{name}-{mode}"
        folder = self._folder / engine
        given = {"kv_transfer": transfer, "sizes": SIZES}
        process = EngineProcess(
            folder,
            "costs.exposure.worker",
            patches,
            json.dumps(given),
            mode,
            recording=True,
            forward_us=self._forward_us,
        )
        self._engines[engine] = self._stack.enter_context(process)
        process.wait_ready()
        self.hashes |= process.patch_hashes
        return engine

    def fill(self, engine: str, blocks: int) -> None:
        self._engines[engine].ask("fill", blocks)

    def load(self, plan: Planned, requests: int, seed: int) -> Seen:
        capacity_rps = MAX_REQUESTS / OUTPUT_TOKENS * 1e6 / (self._forward_us + HOST_US)
        load = plan.cell.load
        rate_rps = 0.0 if load == 1 else load * capacity_rps
        told = self._engines[plan.engine].ask(
            "load",
            plan.delay_us,
            rate_rps,
            max(round(requests * load), MAX_REQUESTS),
            PROMPT_TOKENS,
            OUTPUT_TOKENS,
            seed,
        )
        return Seen(plan.engine, *told)

    def exposed(self, engine: str) -> pl.DataFrame:
        """Exposed us by step and part, once the engine has written its records."""
        records = self._folder / engine / "records"
        ((instance,), _) = read_instances(records)
        device = read_device_steps(records / "device_step.jsonl").records
        return exposed(instance.steps, device)


def injected(rounds: int, requests: int, folder: Path) -> tuple[list, dict]:
    """Known delays: (cell, what was seen, exposed us by part) and the patches."""
    with ExitStack() as stack:
        bench = Bench(folder, stack, FORWARD_US)
        plans = []
        for mode in MODES:
            engine = bench.start("delaying", mode, DELAYING, RECORDING)
            plans += [
                Planned(Cell(mode, load, method, delay_us), engine, {method: delay_us})
                for load in LOADS
                for method, delay_us in itertools.product(METHODS, DELAYS_US)
                # Without a delay all methods are the same cell.
                if delay_us or method == next(iter(METHODS))
            ]
        seen = measure(bench, plans, rounds, requests)
    return with_exposed(bench, seen), bench.hashes


def curves(
    rounds: int, requests: int, configs: list[str], forward_us: int, folder: Path
) -> tuple[list, dict]:
    """Real connectors at a full cache: as `injected`."""
    with ExitStack() as stack:
        bench = Bench(folder, stack, forward_us)
        plans = []
        for name, mode in itertools.product(configs, MODES):
            connector = load_connector(name)
            transfer = connector.kv_transfer_config
            transfer = transfer and CPU_ENGINE.kv_transfer_config | transfer
            engine = bench.start(name, mode, transfer, connector.patches)
            bench.fill(engine, FULL_BLOCKS)
            plans += [
                Planned(Cell(mode, load, name, 0.0), engine, {}) for load in LOADS
            ]
        seen = measure(bench, plans, rounds, requests)
    return with_exposed(bench, seen), bench.hashes


def measure(
    bench: Bench, plans: list[Planned], rounds: int, requests: int
) -> list[tuple[Cell, Seen]]:
    """Each round measures every cell once, all with the same arrivals."""
    order = random.Random(SEED)
    seen = []
    for number in range(rounds):
        for plan in order.sample(plans, len(plans)):
            seen.append((plan.cell, bench.load(plan, requests, number)))
    return seen


def with_exposed(
    bench: Bench, seen: list[tuple[Cell, Seen]]
) -> list[tuple[Cell, Seen, dict[str, float]]]:
    """What was exposed per step, by part, in the steps of each measurement."""
    tables = {engine: bench.exposed(engine) for engine in {s.engine for _, s in seen}}
    found = []
    for cell, one in seen:
        table = tables[one.engine].filter(
            pl.col("step_id").is_between(one.first_step, one.end_step - 1)
        )
        parts = [name for name in table.columns if name.startswith("exposed.")]
        means = {
            name.removeprefix("exposed."): float(table[name].mean() or 0)
            for name in parts
        }
        found.append((cell, one, means))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.exposure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24, help="per cell, at 100 %%")
    parser.add_argument("--out", type=Path, default=Path("runs/exposure.md"))
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error("at least 2 rounds, or there is no interval")
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="kvtax-exposure-") as place:
        told = {}
        told["injected"], hashes = injected(
            chosen.rounds, chosen.requests, Path(place) / "injected"
        )
        for name, forward_us in (("7 ms", FORWARD_US), ("2 ms", SHORT_FORWARD_US)):
            folder = Path(place) / name.replace(" ", "")
            told[name], more = curves(
                chosen.rounds, chosen.requests, CONFIGS, forward_us, folder
            )
            hashes |= more
    facts = provenance.collect(hashes, "python -m costs.exposure")
    text, document = report(told, METHODS, facts)
    write_result(chosen.out, document, text)
    print(text)


if __name__ == "__main__":
    main()
