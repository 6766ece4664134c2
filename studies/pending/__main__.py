# SPDX-License-Identifier: Apache-2.0
"""Cost per step of work that is pending: held sends, keys in flight, polls, pulls.

The code of the release that is named in a row, on its own objects where the connector
starts without a GPU, and on stubs where it does not. Parts:

  leases     NIXL's get_transfer_results while requests wait to be fetched, as it is,
             and with one more float: the earliest lease's end
  keys       UMBP's build_connector_meta while keys are being stored
  transfers  MoRIIO's poll of transfers of 48 layers, whose state is a stub
  polls      SGLang's poll of its transfer queue over ranks: the collective alone
  pulls      a request that is to be pulled, from its arrival until the connector may
             start: with 0.28.0, which starts loads before the forward, and 0.33.0

Levels are visited in rounds, in an order drawn anew. Intervals are 95 %, from
resampling rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import EngineProcess
from kvtax.engine.installation import Installation
from kvtax.engine.releases import on_sources, release, tested_releases
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import LOOPBACK, reserve
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import over_rounds
from studies.harness import main, publish, rows_table
from studies.results import Variant, configure_rounds, engines, turns

NEWEST, BEFORE_FORWARD = "0.33.0", "0.28.0"
ON_A_CPU = ["cpu_uniproc", "cpu_small_blocks"]
CALLS, PULLS = 200, 40
HELD = (0, 100, 500, 1_000, 2_500, 5_000)
KEYS = (0, 1_000, 10_000, 50_000)
TRANSFERS = (0, 8, 32, 128)
QUEUES, RANKS = (1, 32, 128, 512), (1, 2)
FORWARDS_MS = (10, 50)
# State of a transfer under way, as SGLang numbers it.
TRANSFERRING = 3
CONFIGS = {"leases": "nixl_both", "keys": "observatory/umbp", "transfers": "noop"}


class Row(msgspec.Struct):
    """Time at one level of `what`."""

    part: str
    what: str
    level: str
    time: Estimate
    unit: str = "us"


Samples = dict[tuple[str, str], list[Floats]]
# Those that no page shows by a mark of tools.figures.
SHOWN = ("keys", "transfers")
COLUMNS = {
    "what": "{row.what}",
    "level": "{row.level}",
    "time": "{row.time:,.1f}",
    "unit": "{row.unit}",
}


@contextmanager
def engine(
    version: str, config: str, forward_us: int = 0
) -> Iterator[tuple[EngineProcess, dict[str, str]]]:
    """Start an engine on the sources of a release, with the connector of `config`."""
    patches = [] if config == "pulling" else load_connector(config).patches
    variant = {config: Variant([*patches, *ON_A_CPU], (config,))}
    with sources_of(version) as installed:
        options = {"installed": installed, "forward_us": forward_us}
        worker = "studies.pending.worker"
        with engines(worker, variant, **options) as processes:
            yield processes[config], processes[config].patch_hashes


@contextmanager
def sources_of(version: str) -> Iterator[Installation]:
    """Make an installation of a release's sources, on compiled parts of another."""
    with tempfile.TemporaryDirectory() as folder:
        sources = REPOSITORY / "third_party" / f"vllm-{version}"
        yield on_sources(sources, release(tested_releases()[-1]), Path(folder))


def grown(part: str, rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Time a connector's call at each level of what is pending."""
    with engine(NEWEST, CONFIGS[part]) as (process, hashes):
        ask = process.ask
        if part == "leases":
            ways = {"as released": False, "earliest lease kept": True}
            levels = {
                (f"NIXL {NEWEST}, {way}", f"{held:,} held sends"): partial(
                    ask, "time_held_sends", held, earliest, CALLS
                )
                for held in HELD
                for way, earliest in ways.items()
            }
        elif part == "keys":
            levels = {
                (f"UMBP {NEWEST}", f"{keys:,} keys in flight"): partial(
                    ask, "time_keys_in_flight", keys, CALLS
                )
                for keys in KEYS
            }
        else:
            levels = {
                (f"MoRIIO {NEWEST}", f"{transfers} transfers"): partial(
                    ask, "time_transfers", transfers, CALLS
                )
                for transfers in TRANSFERS
            }
        samples: Samples = {level: [] for level in levels}
        for _, level in turns(levels, rounds):
            samples[level].append(levels[level]())
    return [
        Row(part, *level, Estimate.of(over_rounds(np.array(times))))
        for level, times in samples.items()
    ], hashes


class Transfer:
    """A transfer whose state is known at once."""

    def poll(self) -> int:
        return TRANSFERRING


def poll_us(queue: list[Transfer]) -> float:
    """Time one poll of the queue, with the ranks that poll it, too."""
    import torch
    import torch.distributed as dist

    before = time.perf_counter_ns()
    states = torch.tensor([one.poll() for one in queue], dtype=torch.uint8)
    dist.all_reduce(states, op=dist.ReduceOp.MIN)
    states.tolist()
    return (time.perf_counter_ns() - before) / 1e3


def poll_as_rank(lengths: list[int], calls: int) -> None:
    """Poll queues of each length, `calls` times; rank 0 prints the times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times_us = {}
    for length in lengths:
        queue = [Transfer()] * length
        poll_us(queue)
        times_us[length] = [poll_us(queue) for _ in range(calls)]
    if os.environ["RANK"] == "0":
        print(json.dumps(times_us))
    dist.barrier()
    dist.destroy_process_group()


def polls(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Time SGLang's poll with so many ranks on this machine."""
    rows = []
    for ranks in RANKS:
        of_rounds = [_polls_of(ranks) for _ in range(rounds)]
        for length in QUEUES:
            times = np.array([one[str(length)] for one in of_rounds])
            where = f"a poll, {ranks} rank{'s' * (ranks > 1)}"
            estimate = Estimate.of(over_rounds(times))
            rows.append(Row("polls", where, f"{length} transfers", estimate))
    return rows, {}


def _polls_of(ranks: int) -> dict[str, list[float]]:
    place = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(reserve(1)[0].http),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    call = f"poll_as_rank({list(QUEUES)}, {CALLS})"
    script = f"from studies.pending.__main__ import poll_as_rank; {call}"
    command = [sys.executable, "-c", script]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | place | {"RANK": str(rank)},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    found: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return found


def pulls(rounds: int) -> tuple[list[Row], dict[str, str]]:
    """Time a pull from its arrival until the connector may start it."""
    rows = []
    for version in (BEFORE_FORWARD, NEWEST):
        for forward_ms in FORWARDS_MS:
            with engine(version, "pulling", 1_000 * forward_ms) as (process, _):
                found = [process.ask("time_pulls", PULLS) for _ in range(rounds)]
            of_rounds = np.array(found)
            waits, steps = of_rounds[:, 0], of_rounds[:, 1]
            where = f"a pull, vLLM {version}, forward of {forward_ms} ms"
            for name, values in (
                ("mean", waits.mean(axis=1)),
                ("p99", np.quantile(waits, 0.99, axis=1)),
                ("share of a step, mean", (waits / steps).mean(axis=1)),
            ):
                estimate = Estimate.of(over_rounds(values[:, None]))
                unit = "steps" if "share" in name else "ms"
                rows.append(Row("pulls", where, name, estimate, unit))
    return rows, {}


Part = Callable[[int], tuple[list[Row], dict[str, str]]]
PARTS: dict[str, Part] = {part: partial(grown, part) for part in CONFIGS}
PARTS |= {"polls": polls, "pulls": pulls}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.pending`."""
    parser.add_argument("--only", action="append", choices=PARTS)
    configure_rounds(parser, "pending", 9, 3)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rows: list[Row] = []
    hashes: dict[str, str] = {}
    for part in arguments.only or PARTS:
        of_part, used = PARTS[part](arguments.rounds)
        rows += of_part
        hashes |= used
    parts = [rows_table(rows, COLUMNS)]
    with sources_of(NEWEST) as newest:
        return publish("pending", arguments.out, parts, {"rows": rows}, hashes, newest)


def figure(result: dict[str, Any]) -> str:
    """Return the table of the parts that are SHOWN."""
    rows = msgspec.convert(result["rows"], list[Row])
    return rows_table([row for row in rows if row.part in SHOWN], COLUMNS)


if __name__ == "__main__":
    main("pending", __doc__, configure, run)
