# SPDX-License-Identifier: Apache-2.0
"""Gaps between decode-only steps on an H100, and the TPOT that clients see.

Reads records.tar.xz, of holds with 14,000 cached blocks and more. By the same
estimators with asynchronous scheduling and without: the median gap between two steps,
with a bootstrap of steps, and mean TPOT of the clients whose requests decode, with a
bootstrap of holds. Needs no GPU. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtax.stats import Estimate
from kvtax.stats.distribution import SEED, Floats
from kvtax.stats.quantiles import tpot_of
from kvtax.stats.resampling import over_rounds
from studies.harness import STUDIES, main, publish, rows_table

RECORDS = STUDIES / "gpu" / "records.tar.xz"
MIN_BLOCKS, RUNNING = 14_000, 8
# The two levels of the ladder with so many blocks.
LEVELS = (".3.decoders", ".4.decoders")
DECODED_TOKENS = 200
DRAWS = 4_000
SERVERS = (
    ("run", "plain"),
    ("run", "mooncake_both_hash_sync"),
    ("run", "mooncake_both"),
    ("run_async", "mooncake_both_fixed"),
    ("run_sync", "plain"),
    ("run_sync", "mooncake_both_hash_sync"),
)


class Row(msgspec.Struct):
    """A server; `tpot_added_ms` over plain vLLM's of the same run, if there is one."""

    run: str
    config: str
    pairs: int
    gap_ms: Estimate
    tpot_ms: float
    tpot_added_ms: Estimate | None

    @property
    def scheduling(self) -> str:
        """The way of scheduling, in words."""
        return "one step at a time" if self.run == "run_sync" else "asynchronous"

    @property
    def added(self) -> str:
        """The addition to TPOT, if there is one."""
        return f"{self.tpot_added_ms:+.2f}" if self.tpot_added_ms else ""


COLUMNS = {
    "config": "`{row.config}`",
    "scheduling": "{row.scheduling}",
    "gap between two steps, ms": "{row.gap_ms:.3f}",
    "pairs": "{row.pairs:,}",
    "mean TPOT, ms": "{row.tpot_ms:.2f}",
    "more than `plain`": "{row.added}",
}


def lines(files: tarfile.TarFile, run: str, config: str, name: str) -> list[Any]:
    """Read the records `name` of a server."""
    folder = f"{run}/{config}/r0/"
    (member,) = (
        member
        for member in files.getnames()
        if member.startswith(folder) and member.endswith(f"/{name}")
    )
    content = files.extractfile(member)
    assert content is not None
    return [json.loads(line) for line in content]


def gaps_ms(steps: list[Any]) -> Floats:
    """Return ms between decode-only steps with a full batch that follow each other."""

    def counts(step: Any) -> bool:
        alone = step["decode_tokens"] == RUNNING and not step["prefill_tokens"]
        return alone and step["cache_size"] >= MIN_BLOCKS

    timed = [step for step in steps if "t_ns" in step]
    return np.array(
        [
            (later["t_ns"] - earlier["t_ns"]) / 1e6
            for earlier, later in itertools.pairwise(timed)
            if counts(earlier) and counts(later)
        ]
    )


def tpot_ms(requests: list[Any]) -> Floats:
    """Return mean TPOT of each hold: (holds,) ms."""
    of_hold: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        if request.get("phase", "").endswith(LEVELS):
            times = request["first_token_ns"], request["end_ns"]
            tpot_ns = tpot_of(*times, DECODED_TOKENS)
            of_hold[request["phase"]].append((tpot_ns or 0) / 1e6)
    return np.array([np.mean(of) for of in of_hold.values()])


def added(own: Floats, plain: Floats) -> Estimate:
    """Compare means of holds of two servers, each drawn by itself."""
    rng = np.random.default_rng(SEED)
    draws = [
        rng.choice(own, len(own)).mean() - rng.choice(plain, len(plain)).mean()
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(draws, (0.025, 0.975))
    return Estimate(float(own.mean() - plain.mean()), (float(low), float(high)))


def rows() -> list[Row]:
    """Compute a row of each server."""
    servers, tpots = [], {}
    with tarfile.open(RECORDS) as files:
        for run, config in SERVERS:
            gaps = gaps_ms(lines(files, run, config, "engine_step.jsonl"))
            own = tpots[run, config] = tpot_ms(
                lines(files, run, config, "requests.jsonl")
            )
            plain = tpots.get((run, "plain")) if config != "plain" else None
            servers.append(
                Row(
                    run,
                    config,
                    len(gaps),
                    Estimate.of(over_rounds(gaps)),
                    float(own.mean()),
                    None if plain is None else added(own, plain),
                )
            )
    return servers


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `python -m studies.gpu`."""
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.md"))


def run(arguments: argparse.Namespace) -> int:
    """Print and write the table. Returns the exit code."""
    servers = rows()
    parts, result = [rows_table(servers, COLUMNS)], {"rows": servers}
    return publish("gpu", arguments.out, parts, result, {})


def figure(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    return rows_table(msgspec.convert(result["rows"], list[Row]), COLUMNS)


if __name__ == "__main__":
    main("gpu", __doc__, configure, run)
