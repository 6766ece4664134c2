# SPDX-License-Identifier: Apache-2.0
"""Cost of Mooncake's get_finished in a decode-only step, before and after the fix.

The no-op connector is the floor. Mooncake as kv_both is measured as upstream ships it
and with mooncake_get_finished_short_circuit. Each is a process of its own with an
engine on the null model, and nothing is transferred. There are three conditions:

- 1, 8 and 32 running requests;
- the same with a busy Python thread in the process: each wait for an event loop is
  then a wait for the GIL as well;
- sends that nobody pulls, which upstream looks through in every step.

One process at a time steps, in an order drawn anew each round. Intervals are 95 %, from
resampling rounds. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.busy_python import busy_thread
from benchmarks.results import (
    Variant,
    at_least,
    configure_rounds,
    engines,
    publish,
    turns,
)
from kvtax.engine.connector import load_connector
from kvtax.engine.engine_process import EngineProcess, serve
from kvtax.engine.installation import installation
from kvtax.engine.releases import release
from kvtax.engine.settings import CPU_ENGINE
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.distribution import Floats
from kvtax.stats.resampling import over_rounds
from kvtax.verdict.aims import Aim, aims_table

FLOOR, BEFORE, AFTER = "noop", "mooncake", "short-circuit"
NOTHING_PENDING = "nothing pending"
QUANTILES = {"p50": 0.5, "p99": 0.99}
# For the short circuit where nothing is pending, by quantile.
AIM_US = {"p50": 1.0, "p99": 3.0}
MIN_ROUNDS, MIN_STEPS = 4, 40
HELD_SENDS, HELD_DEADLINE_S = 16, 10.0
WARM_UP_SHARE = 0.25

# The last two are what the null model needs on later releases.
UNFIXED = ["mooncake_cpu_layout", "cpu_uniproc", "cpu_small_blocks"]
FIX = "mooncake_get_finished_short_circuit"
VARIANTS = {
    FLOOR: Variant(UNFIXED[1:], ("noop",)),
    BEFORE: Variant(UNFIXED, ("mooncake_both",)),
    AFTER: Variant([*UNFIXED, FIX], ("mooncake_both",)),
}


class Case(NamedTuple):
    """A condition under which all variants are measured."""

    name: str
    batch: int
    busy: bool
    # A share of --steps: with a busy thread a step takes a hundred times as long.
    share: float = 1.0


QUIET = [Case(NOTHING_PENDING, batch, False) for batch in (1, 8, 32)]
BUSY = [Case("busy thread", batch, True, 0.1) for batch in (1, 8, 32)]
# Last, as the sends are held until the process ends.
HELD = [Case(f"{HELD_SENDS} sends held", 8, False)]

# us by case and variant: (rounds, 2, steps), get_finished and the whole step.
Samples = dict[tuple[Case, str], Floats]


class Row(msgspec.Struct):
    """One variant in one case: quantiles of its steps by name, p50 and p99."""

    case: str
    running_requests: int
    variant: str
    rounds: int
    steps: int
    get_finished_us: dict[str, Estimate]
    step_us: dict[str, Estimate]


def measure(
    processes: dict[str, EngineProcess], cases: list[Case], rounds: int, steps: int
) -> Samples:
    """Time all variants in all cases."""
    samples: dict[tuple[Case, str], list[Floats]] = {}
    for case in cases:
        count = round(steps * case.share)
        warm_up = max(1, round(count * WARM_UP_SHARE))
        request = "time_parts", case.batch, count, warm_up, case.busy
        for _, name in turns(processes, rounds):
            samples.setdefault((case, name), []).append(processes[name].ask(*request))
    return {key: np.array(parts) for key, parts in samples.items()}


def rows(samples: Samples) -> list[Row]:
    """Compute a row per case and variant."""
    return [
        Row(
            case.name,
            case.batch,
            variant,
            len(times_us),
            times_us[:, 0].size,
            get_finished_us=quantiles(times_us[:, 0]),
            step_us=quantiles(times_us[:, 1]),
        )
        for (case, variant), times_us in samples.items()
    ]


def quantiles(times_us: Floats) -> dict[str, Estimate]:
    """Compute quantiles of `times_us`, (rounds, steps); rounds are resampled whole."""
    return {
        name: Estimate.of(over_rounds(times_us, lambda of, q=q: np.quantile(of, q)))
        for name, q in QUANTILES.items()
    }


def report(found: list[Row]) -> list[str]:
    """Return a Markdown table of all cases, and one against the aims."""
    head = ["case", "running", "connector", "steps"]
    head += ["get_finished p50 us", "p99", "step p50 us", "p99"]
    body = [
        [row.case, str(row.running_requests), row.variant, f"{row.steps:,}"]
        + [
            f"{quantile:,.{2 if quantile.value < 10 else 1}f}"
            for quantile in (*row.get_finished_us.values(), *row.step_us.values())
        ]
        for row in found
    ]
    aims = [
        (
            Aim(
                what=f"{AFTER}, {row.running_requests} running: get_finished {name}",
                at_most=aim_us,
                unit="us",
            ),
            row.get_finished_us[name],
        )
        for row in found
        if row.variant == AFTER and row.case == NOTHING_PENDING
        for name, aim_us in AIM_US.items()
    ]
    return [table(head, body), aims_table(aims, ".2f")]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench get_finished`."""
    parser.add_argument("--vllm", help="a release; default: the installed one")
    parser.add_argument("--quiet", action="store_true", help="nothing pending only")
    configure_rounds(parser, "get_finished", 12, MIN_ROUNDS)
    parser.add_argument(
        "--steps", type=at_least(MIN_STEPS), default=200, help="per round and case"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    installed = release(arguments.vllm) if arguments.vllm else installation()
    amount = arguments.rounds, arguments.steps
    with engines("benchmarks.get_finished", VARIANTS, installed=installed) as processes:
        hashes = processes[AFTER].patch_hashes
        cases = QUIET if arguments.quiet else QUIET + BUSY
        samples = measure(processes, cases, *amount)
        if not arguments.quiet:
            held = [processes[name].ask("hold_sends") for name in (BEFORE, AFTER)]
            if held == [HELD_SENDS, HELD_SENDS]:
                samples |= measure(processes, HELD, *amount)
            else:
                # Later releases may want more of a prompt that is to be pulled.
                print(f"held sends: left out, {held} are held", file=sys.stderr)
    found = rows(samples)
    results = {"results": found}
    out, parts = arguments.out, report(found)
    return publish("get_finished", out, parts, results, hashes, installed)


# The worker: an engine that times get_finished in each step.


class TimedEngine:
    """An engine on the null model; `get_finished_us` receives one value per step."""

    def __init__(self, model: Path, connector: str) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvtax.engine.null_engine import NullEngine

        of_connector = load_connector(connector).kv_transfer_config
        transfer = CPU_ENGINE.kv_transfer_config | of_connector
        self.engine = NullEngine(model, transfer)
        self.group = get_kv_transfer_group()
        self.get_finished_us: list[float] = []
        # From 0.30 on this is what the worker calls, and it calls the other.
        later = hasattr(self.group, "get_transfer_results")
        name = "get_transfer_results" if later else "get_finished"
        get_finished, clock = getattr(self.group, name), time.perf_counter_ns
        note = self.get_finished_us.append

        def timed(*arguments: Any) -> Any:
            before = clock()
            finished = get_finished(*arguments)
            note((clock() - before) / 1e3)
            return finished

        setattr(self.group, name, timed)


def time_parts(
    timed: TimedEngine, batch: int, steps: int, warm_up: int, busy: bool
) -> Floats:
    """Time get_finished and the whole step, decode-only: (2, steps) us."""
    engine = timed.engine
    ids = engine.decode_batch(batch, warm_up + steps)
    with busy_thread(busy):
        engine.time(warm_up)
        timed.get_finished_us.clear()
        whole = engine.time(steps)
        parts = np.array([timed.get_finished_us[:steps], whole])
    engine.core.abort_requests(ids)
    engine.run_to_end()
    # Not if sends are held; then the cache grows a little instead.
    engine.core.scheduler.reset_prefix_cache()
    return parts


def hold_sends(timed: TimedEngine) -> int:
    """Prefill prompts whose blocks nobody pulls; return how many the worker holds."""
    from kvtax.engine.null_engine import PROMPT_TOKENS

    for number in range(HELD_SENDS):
        params = {"do_remote_decode": True, "transfer_id": f"held-{number}"}
        timed.engine.add([number % 1_000 + 1] * PROMPT_TOKENS, 1, params)
    timed.engine.run_to_end()
    worker = getattr(timed.group, "connector_worker", None)
    if worker is None:
        return 0

    def held() -> int:
        sends = list(worker.reqs_need_send.values())
        return sum(send.ready.is_set() for send in sends)

    # The worker's event loop takes them up some time after the step.
    deadline_s = time.monotonic() + HELD_DEADLINE_S
    while held() < HELD_SENDS and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return held()


if __name__ == "__main__":
    model, connector, socket = sys.argv[1:]
    serve(TimedEngine(Path(model), connector), socket, time_parts, hold_sends)
