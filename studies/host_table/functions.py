# SPDX-License-Identifier: Apache-2.0
"""CPU time of single functions of vLLM, by the length of the list that they walk.

    python -m studies.host_table.functions     # half a minute

In each round all functions and lengths take turns in a random order; a figure is the
median over the rounds, with the interval of a sign test.

- *streaming session*: what the scheduler does with the audio of a session in each step
  (vLLM #58324), by items of audio. All of it was computed before.
- *iteration details*: vLLM's own record of a step (#53550, #52061), by requests.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtax.axes.matrix import Choice
from kvtax.engine.environment import engine_environment
from kvtax.engine.null_model import CPU_ENGINE
from kvtax.paths import REPOSITORY
from kvtax.proc.ports import reserve
from kvtax.stats import Estimate
from kvtax.stats.distribution import SEED
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, publish, rows_table

# Items of a minute, if one has 80 ms; then ten minutes.
ITEMS = (0, 750, 7_500)
RUNNING = (1, 64, 256)
ITEM_TOKENS = 1
# A figure of a few us is the mean of so many calls.
CALLS = 10


class Row(msgspec.Struct):
    """Time of a function that walks a list of `length`."""

    function: str
    length: int
    us: Estimate


COLUMNS = {
    "function": "{row.function}",
    "length": "{row.length:,}",
    "CPU µs": "{row.us:,.1f}",
}


def session(items: int) -> Callable[[], object]:
    """Return a call that strips `items` of audio, as each step of a session does."""
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.multimodal.utils import strip_covered_mm_data

    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem({}),
            modality="audio",
            identifier=str(number),
            mm_position=PlaceholderRange(number * ITEM_TOKENS, ITEM_TOKENS),
        )
        for number in range(items)
    ]
    return lambda: strip_covered_mm_data(features, (items + 1) * ITEM_TOKENS)


def details(running: int) -> Callable[[], object]:
    """Return a call that makes vLLM's record of a step with `running` requests."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.utils import compute_iteration_details

    ids = [str(number) for number in range(running)]

    def record() -> object:
        # Anew in each step, since it keeps what it has computed.
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * running,
            num_computed_tokens=[64] * running,
            num_output_tokens=[9] * running,
        )
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        before_ns = time.thread_time_ns()
        compute_iteration_details(output)
        return time.thread_time_ns() - before_ns

    return record


def measure(rounds: int) -> dict[str, dict[int, list[float]]]:
    """Time all functions in turn: us by function, length and round."""
    calls = {("streaming session", items): session(items) for items in ITEMS}
    calls |= {("iteration details", running): details(running) for running in RUNNING}
    order = random.Random(SEED)
    times: dict[str, dict[int, list[float]]] = {name: {} for name, _ in calls}
    for _ in range(rounds):
        for name, length in order.sample(list(calls), len(calls)):
            us = _time_us(calls[name, length])
            times[name].setdefault(length, []).append(us)
    return times


def _time_us(call: Callable[[], object]) -> float:
    """Return the mean of CALLS; a call that timed itself says how long it took."""
    spans_ns = []
    for _ in range(CALLS):
        before_ns = time.thread_time_ns()
        own = call()
        spent_ns = time.thread_time_ns() - before_ns
        spans_ns.append(own if isinstance(own, int) else spent_ns)
    return sum(spans_ns) / 1e3 / CALLS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.host_table.functions`."""
    parser.add_argument(
        "--vllm", type=Path, default=REPOSITORY / "third_party" / "vllm-0.33.0"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/functions.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    if arguments.worker:
        print("\n" + json.dumps(measure(arguments.rounds)))
        return 0
    choice = Choice(vllm=arguments.vllm)
    with choice.installed(choice.names()) as by_release:
        (installed,) = by_release.values()
        env = engine_environment(None, CPU_ENGINE, reserve(1)[0], installed)
        command = [installed.python, "-m", "studies.host_table.functions", "--worker"]
        command += ["--rounds", str(arguments.rounds)]
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True
        )
        times: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        rows = [
            Row(name, int(length), _estimate(us))
            for name, of in times.items()
            for length, us in sorted(of.items(), key=lambda row: int(row[0]))
        ]
        parts = [rows_table(rows, COLUMNS)]
        result = {"vllm": choice.names()[0], "rows": rows}
        name = "host_table.functions"
        return publish(name, arguments.out, parts, result, {}, installed)


def _estimate(us: list[float]) -> Estimate:
    return Estimate.of(median_of_passes(np.array(us)), 1)


if __name__ == "__main__":
    main("host_table.functions", __doc__, configure, run)
