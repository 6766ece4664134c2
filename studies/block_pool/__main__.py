# SPDX-License-Identifier: Apache-2.0
"""Followers of BlockPool's index: are they exact, and what do they cost?

One suite for the listener of patches/block_pool_delta_listener and for the way of
Dynamo's GPU Memory Service, a class that wraps three methods. Both follow one real pool
of a release while it is used at random, 1,500 operations a seed, and are compared with
the pool after each: first with the operations of that project's own test, a name per
block; then with all that vLLM does. A block is offered to peers when the step that
writes it has ended; what is offered is put into a new pool. Then a block that is cached
and one that is handed out again are timed, without either, patched, and with each.
Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtax.engine.installation import Installation
from kvtax.engine.releases import on_sources, release, tested_releases
from kvtax.paths import REPOSITORY
from kvtax.stats import Estimate
from kvtax.stats.resampling import difference, over_rounds
from studies.harness import main, publish, rows_table
from studies.results import Variant, configure_rounds, engines, turns

RELEASES = ("0.32.0", "0.33.0")
PATCH = "block_pool_delta_listener"
SEEDS = 60
# Calls of a round; the fastest is the round's.
CALLS = 20
UNPATCHED = "as released"
WAYS = {
    UNPATCHED: Variant([], ("nobody",)),
    "patched, nobody listens": Variant([PATCH], ("nobody",)),
    "a listener": Variant([PATCH], ("listener",)),
    "a wrapped class": Variant([], ("wrapped",)),
}
SETS = {"a name per block": False, "all": True}


class Explored(msgspec.Struct):
    """Counts of the explorations with a set of operations."""

    release: str
    operations: str
    counts: dict[str, int]


class Cost(msgspec.Struct):
    """Time per block: as released, and how much more in each way, in ns."""

    release: str
    way: str
    cached_ns: Estimate
    reused_ns: Estimate


EXPLORED = {
    "release": "{row.release}",
    "operations": "{row.operations}",
    "checks": "{row.counts[checks]:,}",
    "listener differs": "{row.counts[listener differs]:,}",
    "its tokens differ": "{row.counts[listener has other tokens]:,}",
    "named, not computed": "{row.counts[named, not computed]:,}",
    "offered, not computed": "{row.counts[offered, not computed]:,}",
    "wrapper differs": "{row.counts[wrapper differs]:,}",
    "wrapper has too much": "{row.counts[wrapper has too much]:,}",
    "restores that differ": "{row.counts[restore differs]:,} of {row.counts[restores]}",
}
COSTS = {
    "release": "{row.release}",
    "way": "{row.way}",
    "ns per block cached": "{row.cached_ns:.0f}",
    "ns per block handed out again": "{row.reused_ns:.0f}",
}


def measure(
    version: str, installed: Installation, seeds: int, rounds: int
) -> tuple[list[Explored], list[Cost], dict[str, str]]:
    """Explore a release's pool, then time it."""
    with engines("studies.block_pool.worker", WAYS, installed=installed) as processes:
        listening = processes["a listener"]
        explored = [
            Explored(version, name, listening.ask("explore", seeds, all_operations))
            for name, all_operations in SETS.items()
        ]
        samples: dict[str, list[Any]] = {way: [] for way in WAYS}
        for _, way in turns(WAYS, rounds):
            times = [processes[way].ask("time_blocks") for _ in range(CALLS)]
            samples[way].append(np.min(times, axis=0))
        return explored, costs(version, samples), listening.patch_hashes


def costs(version: str, samples: dict[str, list[Any]]) -> list[Cost]:
    """Compute times as released, and differences to them within rounds."""
    times = {way: np.array(of) for way, of in samples.items()}
    base = times.pop(UNPATCHED)
    found = [Cost(version, UNPATCHED, *(_of(over_rounds(one)) for one in base.T))]
    for way, of in times.items():
        more = [_of(difference(*both)) for both in zip(of.T, base.T, strict=True)]
        found.append(Cost(version, f"{way}, more", *more))
    return found


def _of(distribution: Any) -> Estimate:
    return Estimate.of(distribution, 1)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.block_pool`."""
    parser.add_argument("--release", action="append", help="(repeatable; default: two)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    configure_rounds(parser, "block_pool", 15, 3)


def run(arguments: argparse.Namespace) -> int:
    """Explore and time each release, print the result and return the exit code."""
    explored: list[Explored] = []
    timed: list[Cost] = []
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in arguments.release or RELEASES:
            sources = REPOSITORY / "third_party" / f"vllm-{version}"
            compiled = release(tested_releases()[-1])
            installed = on_sources(sources, compiled, Path(folder, version))
            found = measure(version, installed, arguments.seeds, arguments.rounds)
            explored += found[0]
            timed += found[1]
            hashes |= found[2]
        result = {"explored": explored, "costs": timed}
        parts = [figure(msgspec.to_builtins(result))]
        publish("block_pool", arguments.out, parts, result, hashes, installed)
    return int(any(faults(one) for one in explored))


def faults(one: Explored) -> int:
    """Count the checks and restores in which the listener was wrong."""
    wrong = ("listener differs", "listener has other tokens", "offered, not computed")
    return sum(one.counts[name] for name in (*wrong, "restore differs"))


def figure(result: dict[str, Any]) -> str:
    """Return the tables of a result."""
    explored = msgspec.convert(result["explored"], list[Explored])
    timed = msgspec.convert(result["costs"], list[Cost])
    return f"{rows_table(explored, EXPLORED)}\n\n{rows_table(timed, COSTS)}"


if __name__ == "__main__":
    main("block_pool", __doc__, configure, run)
