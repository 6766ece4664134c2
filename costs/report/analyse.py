# SPDX-License-Identifier: Apache-2.0
"""Analyse a run directory in this process; prints what it took as JSON."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import msgspec


class Taken(msgspec.Struct):
    """What the analysis took, and enough of its result to see that there is one."""

    load_s: float
    analyse_s: float
    all_s: float
    cpu_s: float
    peak_rss_mb: float
    decode_only_steps: int
    slope: dict


def main() -> None:
    began_s = time.perf_counter()
    # The imports are part of what a user waits for.
    from microbench.analysis.analysis import analyse
    from microbench.analysis.trials import load_run

    run, trials = load_run(Path(sys.argv[1]))
    loaded_s = time.perf_counter()
    entry = analyse(run, trials, None).document.configs["plain"]
    done_s = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    taken = Taken(
        load_s=loaded_s - began_s,
        analyse_s=done_s - loaded_s,
        all_s=done_s - began_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_rss_mb=usage.ru_maxrss / 1e3,
        decode_only_steps=entry.n_decode_steps,
        slope=entry.slope_us_per_1k_blocks["schedule"],
    )
    print(msgspec.json.encode(taken).decode())


if __name__ == "__main__":
    main()
