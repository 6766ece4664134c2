# SPDX-License-Identifier: Apache-2.0
"""Order of vLLM's free blocks over rounds, each ended by a reset of the prefix cache.

    python -m studies.threads.free_queue     # a minute

vLLM #40244. A round is a rollout: requests of varied lengths decode side by side, end
in any order, and then `reset_prefix_cache()` is called. The head of the queue is what
the next prompt gets: its runs of ascending neighbours are counted, in vLLM's own
BlockPool. Nothing is timed, so a loaded machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvtax.axes.matrix import Choice
from kvtax.engine.environment import engine_environment
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, publish, rows_table

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

POOL_BLOCKS, BLOCK_TOKENS = 12_000, 16
ROUNDS = (0, 1, 2, 4, 8, 16)
# Of each round, and side by side.
REQUESTS, RUNNING = 32, 16
# A prompt's blocks are exp(N(5, 1)), as in the evidence for sorted groups.
LOG_MEAN, FEWEST, MOST = 5.0, 8, 2_000
ANSWER_BLOCKS = 60
# What the next prompt gets.
NEXT_BLOCKS = 2_000
SEEDS = 10


class Row(msgspec.Struct):
    """Runs of ascending ids in the next 2,000 blocks after so many rounds."""

    prefix_caching: bool
    rounds: int
    runs: Estimate
    descending_share: Estimate


COLUMNS = {
    "prefix caching": "{row.prefix_caching}",
    "rounds": "{row.rounds}",
    "runs in the next 2,000 blocks": "{row.runs:,.0f}",
    "neighbours that descend, share": "{row.descending_share:.2f}",
}


class Rollouts:
    """A pool of blocks through rounds of requests, by a seed."""

    def __init__(self, prefix_caching: bool, seed: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool: BlockPool = BlockPool(POOL_BLOCKS, prefix_caching, BLOCK_TOKENS)
        self._caching = prefix_caching
        self._chance = random.Random(seed)
        self._prompts = 0

    def round(self) -> None:
        """Serve the requests of a round, then reset the prefix cache."""
        running: list[tuple[list[KVCacheBlock], int]] = []
        waiting = REQUESTS
        while waiting or running:
            while waiting and len(running) < RUNNING:
                prompt = self._take(self._prompt_blocks())
                running.append((prompt, self._chance.randrange(1, ANSWER_BLOCKS)))
                waiting -= 1
            chosen = self._chance.randrange(len(running))
            blocks, left = running.pop(chosen)
            if left:
                running.append((blocks + self._take(1), left - 1))
            else:
                self.pool.free_blocks(reversed(blocks))
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("blocks are still in use after a round")

    def _prompt_blocks(self) -> int:
        drawn = self._chance.lognormvariate(LOG_MEAN, 1.0)
        return int(min(MOST, max(FEWEST, drawn)))

    def _take(self, count: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(count)
        if self._caching:
            self._prompts += 1
            hashes = [f"{self._prompts}-{n}".encode().rjust(32) for n in range(count)]
            request = SimpleNamespace(block_hashes=hashes)
            self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK_TOKENS, 0)
        return blocks

    def next_blocks(self) -> tuple[int, float]:
        """Count runs of ascending ids, and the share of neighbours that descend."""
        free = self.pool.free_block_queue.get_all_free_blocks()[:NEXT_BLOCKS]
        steps = np.diff([block.block_id for block in free])
        return 1 + int((steps != 1).sum()), float((steps == -1).mean())


def measure() -> list[tuple[bool, int, list[int], list[float]]]:
    """Return prefix caching, rounds, and both counts by seed."""
    rows = []
    for caching in (True, False):
        rollouts = [Rollouts(caching, seed) for seed in range(SEEDS)]
        served = 0
        for rounds in ROUNDS:
            for _ in range(rounds - served):
                for of_seed in rollouts:
                    of_seed.round()
            served = rounds
            runs, descending = zip(*(of.next_blocks() for of in rollouts), strict=True)
            rows.append((caching, rounds, list(runs), list(descending)))
    return rows


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.threads.free_queue`."""
    parser.add_argument(
        "--vllm", type=Path, default=REPOSITORY / "third_party" / "vllm-0.33.0"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/free_queue.md"))


def run(arguments: argparse.Namespace) -> int:
    """Count, print the result and return the exit code."""
    if arguments.worker:
        print("\n" + json.dumps(measure()))
        return 0
    choice = Choice(vllm=arguments.vllm)
    with choice.installed(choice.names()) as by_release:
        (installed,) = by_release.values()
        env = engine_environment(None, CPU_ENGINE, reserve(1)[0], installed)
        command = [installed.python, "-m", "studies.threads.free_queue", "--worker"]
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
        )
        rows = [
            Row(caching, rounds, _estimate(runs), _estimate(descending))
            for caching, rounds, runs, descending in json.loads(
                done.stdout.splitlines()[-1]
            )
        ]
        parts = [rows_table(rows, COLUMNS)]
        result = {"vllm": choice.names()[0], "seeds": SEEDS, "rows": rows}
        return publish(
            "threads.free_queue", arguments.out, parts, result, {}, installed
        )


def _estimate(of_seeds: list[float]) -> Estimate:
    return Estimate.of(median_of_passes(np.array(of_seeds, float)), 3)


if __name__ == "__main__":
    main("threads.free_queue", __doc__, configure, run)
