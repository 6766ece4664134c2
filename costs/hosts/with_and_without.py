# SPDX-License-Identifier: Apache-2.0
"""Does Ray on a host change what a sweep measures there? With and without, in turn.

    python -m costs.hosts.with_and_without [--rounds N]

A round has three sweeps of two configs with a server each, in random order: two without
Ray, and one by a Ray cluster of this host, which is there for as long. The two without
are alike, so what they differ by is the floor. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from costs.hosts.ray_here import ray_here
from lab.paths import REPOSITORY
from lab.records.documents import read_document
from lab.records.per_config import PerConfig
from lab.serving.supervise import exit_on_signals
from lab.stats.interval import Interval
from lab.stats.markdown import table
from lab.stats.rounds import difference, ratio

WITHOUT, AGAIN, WITH = "without", "again", "with"
CONFIGS = ("plain", "noop")
METRICS = ("schedule", "step")
# Of a config in a sweep: a level, then a slope, for each metric.
Found = list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.hosts.with_and_without",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    exit_on_signals()
    found: dict[str, list[list[Found]]] = {WITHOUT: [], AGAIN: [], WITH: []}
    order = random.Random(0)
    for number in range(chosen.rounds):
        for variant in order.sample(list(found), len(found)):
            found[variant].append(swept(variant == WITH))
            print(f"round {number}: {variant}", file=sys.stderr)
    values = {variant: np.array(rounds) for variant, rounds in found.items()}
    print(report(values))


def swept(with_ray: bool) -> list[Found]:
    """What a sweep finds, by config. Raises CalledProcessError."""
    command = [sys.executable, "-m", "microbench.sweep", "--profile", "cpu-smoke"]
    for config in CONFIGS:
        command += ["--only", config]
    with (
        tempfile.TemporaryDirectory(prefix="kvtax-ray-") as folder,
        ray_here() if with_ray else nullcontext() as address,
    ):
        out = Path(folder) / "run"
        more = ["--repeats", "1", "--out", str(out)]
        more += ["--ray", address] if address else []
        subprocess.run(
            [*command, *more], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
        )
        configs = read_document(out / "per_config.json", PerConfig).configs
    return [
        [configs[name].level_us(metric)["p50"] for metric in METRICS]
        + [configs[name].slope_us_per_1k_blocks[metric]["value"] for metric in METRICS]
        for name in CONFIGS
    ]


def report(values: dict[str, np.ndarray]) -> str:
    """Markdown; of `values`, (rounds, configs, levels and slopes) each."""
    rows = []
    for of, compared in ((0, ratio), (len(METRICS), difference)):
        for number, metric in enumerate(METRICS, of):
            base = values[WITHOUT][:, :, number]
            told = "p50, ratio" if compared is ratio else "slope, µs more per 1,000"
            cells = [
                f"{Interval.of(one):.3f}"
                for variant in (WITH, AGAIN)
                for one in [compared(values[variant][:, :, number], base)]
            ]
            rows.append([f"{metric}: {told}", *cells])
    return table(["", "with Ray / without", "without / without"], rows)


if __name__ == "__main__":
    main()
