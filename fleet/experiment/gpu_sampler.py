# SPDX-License-Identifier: Apache-2.0
"""GPU utilisation to a CSV while something else runs: a process of its own.

    python -m fleet.experiment.gpu_sampler --out gpu.csv [--interval-ms 500]

One row per GPU and sample, stamped with CLOCK_MONOTONIC so that it joins the requests:
monotonic_ns, gpu, utilization_percent, memory_used_mib, power_w, sm_clock_mhz; a field
that the GPU does not report is empty. Runs until SIGTERM, SIGINT or its parent's end.

Without nvidia-smi it writes nothing, says so, and exits 0: a machine without a GPU is
no error. Exit status 1 if nvidia-smi is there but ends by itself.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FIELDS = {
    "index": "gpu",
    "utilization.gpu": "utilization_percent",
    "memory.used": "memory_used_mib",
    "power.draw": "power_w",
    "clocks.sm": "sm_clock_mhz",
}
HEADER = ",".join(("monotonic_ns", *FIELDS.values()))
PR_SET_PDEATHSIG = 1


def row(now_ns: int, line: str) -> str | None:
    """A CSV row from a line of nvidia-smi; None if it is not one."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(FIELDS) or not values[0].isdigit():
        return None
    known = ["" if value.startswith("[") else value for value in values]
    return ",".join((str(now_ns), *known))


def sample(command: list[str], out: Path) -> int:
    """Run `command`, stamp its lines, until it ends; its exit status."""
    with (
        out.open("w", buffering=1) as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            preexec_fn=_die_with_parent,
        ) as process,
    ):
        try:
            print(HEADER, file=file)
            for line in process.stdout:
                if text := row(time.monotonic_ns(), line):
                    print(text, file=file)
        finally:
            process.terminate()
        return process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fleet.experiment.gpu_sampler",
        description="Sample GPU utilisation to a CSV.",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interval-ms", type=int, default=500)
    chosen = parser.parse_args(argv)
    found = shutil.which("nvidia-smi")
    if found is None:
        print("gpu sampler: no nvidia-smi here: nothing to sample")
        return 0
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if os.getppid() != parent:
        return 0  # it went before we could ask to go with it
    query = f"--query-gpu={','.join(FIELDS)}"
    command = [found, query, "--format=csv,noheader,nounits"]
    status = sample([*command, f"--loop-ms={chosen.interval_ms}"], chosen.out)
    print(f"gpu sampler: nvidia-smi ended with status {status}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
