# SPDX-License-Identifier: Apache-2.0
"""How long do equal runs in virtual time take on a host of a Ray cluster, and without?

    python -m costs.hosts.cells [--runs N]

One arm, N orders of the same sessions: on one core, on all cores, and on all cores by a
Ray cluster of this host. The ideal is one core's time per run, divided by the cores. A
run's time is taken from the first result to the last one, so that starts are left out.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from costs.hosts.ray_here import ray_here
from lab.paths import REPOSITORY
from lab.serving.supervise import exit_on_signals
from lab.stats.markdown import table

# A few seconds each.
EXPERIMENT = """
summary = "equal runs"
profile = "h20-30b-a3b"
instances = 4
concurrency = [2]
repeats = {runs}
baseline = "linear"

[workload]
trace = "traces/claude_code_sessions_le62k.jsonl.gz"
sessions = 16
max_turns = 4
max_output_tokens = 80
max_think_s = 0

[arms.linear]
policy = "linear"
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.hosts.cells", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=60)
    chosen = parser.parse_args()
    exit_on_signals()
    cores = sorted(os.sched_getaffinity(0))
    one_core = ["taskset", "-c", str(cores[0])]
    alone_s = seconds_per_run(one_core, max(chosen.runs // len(cores), 3))
    here_s = seconds_per_run([], chosen.runs)
    with ray_here() as address:
        hosts_s = seconds_per_run([], chosen.runs, "--ray", address)
    ideal_s = alone_s / len(cores)
    found = {
        "one core": alone_s,
        f"ideal of {len(cores)} cores": ideal_s,
        f"{len(cores)} cores": here_s,
        f"{len(cores)} cores, with Ray": hosts_s,
    }
    rows = [[name, f"{s:.2f}", f"{s / ideal_s:.2f}"] for name, s in found.items()]
    print(table(["", "s per run", "times the ideal"], rows))


def seconds_per_run(within: list[str], runs: int, *more: str) -> float:
    """Between the first result and the last one of `runs`.

    Raises SystemExit if the experiment fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvtax-cells-") as folder:
        config = Path(folder) / "equal.toml"
        config.write_text(EXPERIMENT.format(runs=runs))
        command = [sys.executable, "-m", "fleet.experiment", str(config), "--virtual"]
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
        raise SystemExit(f"{len(moments_s)} of {runs} runs were made")
    return (moments_s[-1] - moments_s[0]) / (runs - 1)


if __name__ == "__main__":
    main()
