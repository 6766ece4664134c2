# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of a fleet in virtual time, beside its floor.

The floor is vLLM's engine core alone, stepped without proxy, replayer and records: no
simulation with vLLM's own scheduler is faster. Each simulation is a fork of one process
that has imported vLLM. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.results import Variant, configure_rounds, engines, publish
from kvtax.engine.engine_process import serve
from kvtax.fleet.launch.instance_settings import read_instance_settings
from kvtax.fleet.proxy.settings import Settings, resolved
from kvtax.fleet.replay.options import Options
from kvtax.fleet.simulate.cells import Cell, Member
from kvtax.fleet.simulate.cost import StepCost
from kvtax.fleet.trace import write_trace
from kvtax.fleet.trace.request import Request
from kvtax.paths import CONFIGS
from kvtax.records.arm import ArmRecord, PlannedArm, TraceFacts
from kvtax.records.files import read_document
from kvtax.records.host_times import RequestTimes, StepTimes
from kvtax.records.instances import Instance
from kvtax.stats.markdown import table

PROFILE = read_instance_settings(CONFIGS / "fleet" / "h20-30b-a3b.toml")
PROMPT_TOKENS, OUTPUT_TOKENS = 4_096, 256
# Each slot has so many requests, one after the other.
ROUNDS = 8
VOCABULARY = 1_000
MAX_MODEL_LEN = 65_536
INSTANCES = 8
RUNNING = (8, 32, 60)


def measure(rounds: int) -> list[dict[str, float]]:
    """Compute a row for each number of running requests."""
    variants = {"": Variant([])}
    with engines(
        "benchmarks.virtual", variants, max_model_len=MAX_MODEL_LEN
    ) as processes:
        ask = processes[""].ask
        return [
            _row(
                running,
                [
                    (
                        ask("alone", running),
                        ask("fleet", 1, running),
                        ask("fleet", INSTANCES, running),
                    )
                    for _ in range(rounds)
                ],
            )
            for running in RUNNING
        ]


def _row(running: int, rounds: list[tuple[dict[str, float], ...]]) -> dict[str, float]:
    def rate(simulation: dict[str, float]) -> float:
        return simulation["instance_s"] / simulation["core_s"]

    more_mib = median(fleet["peak_mib"] - one["peak_mib"] for _, one, fleet in rounds)
    return {
        "running": running,
        "floor_instance_s_per_core_s": median(rate(floor) for floor, _, _ in rounds),
        "fleet_instance_s_per_core_s": median(rate(fleet) for _, _, fleet in rounds),
        "mib_per_instance": more_mib / (INSTANCES - 1),
    }


def report(rows: list[dict[str, float]]) -> list[str]:
    """Return the parts of the page."""
    head = ["running requests per instance", "engine core alone", "fleet of 8", "MiB"]
    cells = [[f"{number:.0f}" for number in row.values()] for row in rows]
    title = "Simulated instance-seconds per core-second, and memory per instance:"
    return [title, table(head, cells)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench virtual`."""
    configure_rounds(parser, "virtual", 3)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    rows = measure(arguments.rounds)
    return publish("virtual", arguments.out, report(rows), {"results": rows}, {})


# The worker: simulates in forks, and reports what each took.


def alone(model: str, running: int) -> dict[str, float]:
    """Simulate vLLM's engine core with our executor and nothing else."""
    return forked(_measured, _alone, model, running)


def fleet(model: str, instances: int, running: int) -> dict[str, float]:
    """Simulate a whole run: replayer, proxy, policy `linear`, records."""
    return forked(_measured, _fleet, model, instances, running)


def forked(
    work: Callable[..., dict[str, float]], *arguments: object
) -> dict[str, float]:
    """Do the work in a fork of this process; return its result."""
    receiving, sending = Pipe(duplex=False)
    child = get_context("fork").Process(target=_sent, args=(sending, work, arguments))
    child.start()
    # Or a child that fails would leave this process waiting.
    sending.close()
    result = receiving.recv()
    child.join()
    return result


def _sent(
    parent: Connection, work: Callable[..., dict[str, float]], arguments: tuple
) -> None:
    parent.send(work(*arguments))


def _measured(simulation: Callable[..., float], *arguments: object) -> dict[str, float]:
    began_s = time.process_time()
    instance_s = simulation(*arguments)
    core_s = time.process_time() - began_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"instance_s": instance_s, "core_s": core_s, "peak_mib": peak_mib}


def arguments_of(model: str) -> list[str]:
    options = {
        "--model": model,
        "--load-format": "dummy",
        "--block-size": PROFILE.block_size,
        "--num-gpu-blocks-override": PROFILE.num_blocks,
        "--max-model-len": PROFILE.max_model_len,
        "--max-num-batched-tokens": PROFILE.max_num_batched_tokens,
        "--max-num-seqs": PROFILE.max_num_seqs,
        "--stream-interval": 16,
    }
    switches = ["--skip-tokenizer-init", "--enforce-eager"]
    return [str(part) for pair in options.items() for part in pair] + switches


def _alone(model: str, running: int) -> float:
    from kvtax.fleet.simulate.virtual_engine import VirtualEngine

    cost = StepCost(PROFILE.forward, StepTimes())
    engine = VirtualEngine(arguments_of(model), cost, False)
    waiting = iter(range(running * ROUNDS))

    def begin() -> None:
        for number in waiting:
            prompt = [number % VOCABULARY, number // VOCABULARY] * (PROMPT_TOKENS // 2)
            engine.add(str(number), prompt, OUTPUT_TOKENS, None)
            return

    for _ in range(running):
        begin()
    while engine.has_work:
        outputs = engine.step()
        for output in outputs.outputs if outputs else []:
            if output.finish_reason is not None:
                begin()
    return engine.clock.now_ns / 1e9


def _fleet(model: str, instances: int, running: int) -> float:
    with simulated(model, instances, running) as folder:
        replay_s = read_document(folder / "arm.json", ArmRecord).replay_s
    return instances * replay_s


@contextmanager
def simulated(
    model: str, instances: int, running: int, host: StepTimes | None = None
) -> Iterator[Path]:
    """Simulate a run with so many requests under way; yield its folder."""
    from kvtax.fleet.simulate.run_cells import run_cell

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        requests = _requests(instances * running * ROUNDS)
        write_trace(folder / "trace.jsonl", {"requests": len(requests)}, requests)
        members = [
            Member(
                Instance(f"i{n}", f"http://i{n}", block_tokens=PROFILE.block_size),
                arguments_of(model),
            )
            for n in range(instances)
        ]
        cell = Cell(
            folder=str(folder / "run"),
            trace=str(folder / "trace.jsonl"),
            planned=PlannedArm(arm="cost", repeat=0, trace=_facts(requests)),
            patches={},
            members=members,
            forward=PROFILE.forward,
            host=host or StepTimes(),
            requests=RequestTimes(),
            overlapping=False,
            transfer=None,
            event_delay_ns=0,
            event_loss=0.0,
            vocab_size=VOCABULARY,
            max_model_len=PROFILE.max_model_len,
            proxy=resolved([member.instance for member in members], Settings("linear")),
            replay=Options(
                url="virtual",
                trace="trace.jsonl",
                max_inflight_sessions=instances * running,
                closed_loop=True,
            ),
            seed=0,
        )
        run_cell(cell)
        yield folder / "run"


def _requests(count: int) -> list[Request]:
    blocks = PROMPT_TOKENS // 64
    return [
        Request(
            arrival_s=0.0,
            session=str(number),
            turn=0,
            input_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            hashes=list(range(number * blocks, (number + 1) * blocks)),
            block_tokens=64,
        )
        for number in range(count)
    ]


def _facts(requests: list[Request]) -> TraceFacts:
    count = len(requests)
    return TraceFacts(
        "trace.jsonl",
        "",
        "",
        count,
        count,
        count * PROMPT_TOKENS,
        count * OUTPUT_TOKENS,
    )


if __name__ == "__main__":
    from kvtax.fleet.simulate.virtual_engine import VirtualEngine

    model, socket = sys.argv[1:]
    # What making an engine imports, the forks need not.
    VirtualEngine(arguments_of(model), StepCost(PROFILE.forward, StepTimes()), False)
    serve(model, socket, alone, fleet)
