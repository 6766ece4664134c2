# SPDX-License-Identifier: Apache-2.0
"""Cost of a Ray cluster, which is started on this host alone and stopped again.

tasks: handing out tasks that take no time, to the host.
cells: equal runs in virtual time: on one core, on all cores, and on all cores by Ray.
    The ideal is one core's time per run, divided by the cores. A run's time is taken
    from the first result to the last one, so that starts are left out.
sweeps: whether Ray changes what a sweep measures. A round has three sweeps of two
    configs with a server each, in random order: two without Ray, whose difference is
    the floor, and one by Ray.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np

from benchmarks.results import NotMeasured, turns
from kvtax.engine.ports import reserve
from kvtax.engine.server import tail
from kvtax.hosts.driver import spread
from kvtax.hosts.worker import serve
from kvtax.paths import REPOSITORY
from kvtax.records.files import read_document
from kvtax.records.per_config import PerConfig
from kvtax.stats import Estimate
from kvtax.stats.markdown import table
from kvtax.stats.resampling import difference, ratio

READY_S = 60
# About what a run in virtual time leaves of 300 requests.
RESULT_BYTES = 200_000
# A few seconds each.
EXPERIMENT = """
summary = "equal runs"
profile = "h20-30b-a3b"
instances = 4
concurrency = [2]
repeats = {runs}
baseline = "linear"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.xz"
sessions = 16
max_turns = 4
max_output_tokens = 80
max_think_s = 0

[arms.linear]
policy = "linear"
"""
WITHOUT, AGAIN, WITH = "without", "again", "with"
CONFIGS = ("plain", "noop")
METRICS = ("schedule", "step")


@contextmanager
def ray_here() -> Iterator[str]:
    """Start a cluster as docs/hosts.md says, and yield its address.

    It ends with the block, or with this process.
    """
    with tempfile.TemporaryDirectory(prefix="kvh", ignore_cleanup_errors=True) as made:
        port = reserve(1)[0].http
        command = ["setpriv", "--pdeathsig", "TERM"]
        command += [str(Path(sys.executable).with_name("ray")), "start", "--head"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1"]
        command += ["--block", "--include-dashboard=false", "--disable-usage-stats"]
        # Else Ray keeps 10002 to 19999 for them, and refuses any other use of these.
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0"}
        # Not a `Supervised`: a sweep refuses to start beside what others supervise.
        with (Path(made) / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--temp-dir={made}/ray"], env=env, stdout=log, stderr=log
            )
        try:
            _wait_for(port, process, Path(log.name))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port)).close()
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise NotMeasured(f"no Ray at {port} within {READY_S} s:\n{tail(log)}")
        time.sleep(0.2)


def time_tasks(count: int) -> str:
    """Hand out tasks; return the table of when their results came."""
    contents = [os.urandom(RESULT_BYTES) for _ in range(8)]
    tasks = [contents[number % 8] for number in range(count)]
    with ray_here() as address:
        began_s = time.monotonic()
        results = spread(address, "benchmarks.hosts", {}, tasks)
        moments_s = [time.monotonic() - began_s for _ in results]
    each_ms = np.diff(moments_s) * 1e3
    low_ms, high_ms = np.percentile(each_ms, [5, 95])
    # The first result comes when the host's process has started.
    row = [f"{count:,}", f"{moments_s[0]:.1f}", f"{each_ms.mean():.2f}"]
    head = ["tasks", "first result after, s", "ms per task", "the 90 % between, ms"]
    return table(head, [[*row, f"{low_ms:.2f} to {high_ms:.2f}"]])


def time_cells(runs: int) -> str:
    """Run the experiment in three ways; return the table of s per run."""
    cores = sorted(os.sched_getaffinity(0))
    one_core = ["taskset", "-c", str(cores[0])]
    alone_s = seconds_per_run(one_core, max(runs // len(cores), 3))
    here_s = seconds_per_run([], runs)
    with ray_here() as address:
        ray_s = seconds_per_run([], runs, "--ray", address)
    ideal_s = alone_s / len(cores)
    seconds = {
        "one core": alone_s,
        f"ideal of {len(cores)} cores": ideal_s,
        f"{len(cores)} cores": here_s,
        f"{len(cores)} cores, with Ray": ray_s,
    }
    rows = [[name, f"{s:.2f}", f"{s / ideal_s:.2f}"] for name, s in seconds.items()]
    return table(["", "s per run", "times the ideal"], rows)


def seconds_per_run(within: list[str], runs: int, *more: str) -> float:
    """Time from the first result to the last one, per run. Raises NotMeasured."""
    with tempfile.TemporaryDirectory(prefix="kvtax-cells-") as folder:
        config = Path(folder) / "equal.toml"
        config.write_text(EXPERIMENT.format(runs=runs))
        command = [sys.executable, "-m", "kvtax", "fleet", str(config), "--virtual"]
        command += ["--out", str(Path(folder) / "run"), *more]
        moments_s = []
        with subprocess.Popen(
            [*within, *command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                for line in process.stdout:
                    if f"/{runs}  " in line:
                        moments_s.append(time.monotonic())
            finally:
                process.terminate()
    if len(moments_s) != runs:
        raise NotMeasured(f"{len(moments_s)} of {runs} runs were made")
    return (moments_s[-1] - moments_s[0]) / (runs - 1)


def compare_sweeps(rounds: int) -> str:
    """Sweep with Ray and without; return the table of how levels and slopes differ."""
    swept: dict[str, list[list[list[float]]]] = {WITHOUT: [], AGAIN: [], WITH: []}
    for number, variant in turns(swept, rounds):
        swept[variant].append(sweep(variant == WITH))
        print(f"round {number}: {variant}", file=sys.stderr)
    values = {variant: np.array(of_rounds) for variant, of_rounds in swept.items()}
    columns = [
        *((f"{metric}: p50, ratio", ratio) for metric in METRICS),
        *((f"{metric}: slope, µs more per 1,000", difference) for metric in METRICS),
    ]
    rows = [
        [title]
        + [
            f"{Estimate.of(compare(values[v][..., n], values[WITHOUT][..., n])):.3f}"
            for v in (WITH, AGAIN)
        ]
        for n, (title, compare) in enumerate(columns)
    ]
    return table(["", "with Ray / without", "without / without"], rows)


def sweep(with_ray: bool) -> list[list[float]]:
    """Run a sweep; return levels, then slopes, of each config."""
    command = [sys.executable, "-m", "kvtax", "sweep", "--profile", "cpu-smoke"]
    for config in CONFIGS:
        command += ["--only", config]
    with (
        tempfile.TemporaryDirectory(prefix="kvtax-ray-") as folder,
        ray_here() if with_ray else nullcontext() as address,
    ):
        out = Path(folder) / "run"
        command += ["--repeats", "1", "--out", str(out)]
        command += ["--ray", address] if address else []
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        configs = read_document(out / "per_config.json", PerConfig).configs
    return [
        [configs[name].level_us(metric)["p50"] for metric in METRICS]
        + [configs[name].slope_us_per_1k_blocks[metric].value for metric in METRICS]
        for name in CONFIGS
    ]


# What is measured, with its default count: tasks, runs, rounds.
COMPARISONS = {
    "tasks": (time_tasks, 2_000),
    "cells": (time_cells, 60),
    "sweeps": (compare_sweeps, 3),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench hosts`."""
    parser.add_argument("what", choices=COMPARISONS)
    parser.add_argument("--count", type=int, help="of tasks, runs or rounds")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    measure, count = COMPARISONS[arguments.what]
    print(measure(arguments.count or count))
    return 0


def write_result(content: bytes, made: Path) -> None:
    """Do a host's task: its result is its own bytes."""
    (made / "result").write_bytes(content)


if __name__ == "__main__":
    sys.exit(serve(lambda _: nullcontext(write_result)))
