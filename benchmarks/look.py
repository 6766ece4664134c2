# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of `kvtax look` for a server of many steps.

Repeats the records of a server that the demo ships, with step ids, moments and request
ids that go on, in a temporary folder (4.5 GB for 10 million steps). With --ranks, each
rank of a worker has records of its own. Looks at them in a process of its own, whose
times and peak memory come from the kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtax.look.demo import unpack
from kvtax.report.markdown import table
from studies.results import at_least, publish, usage_of

# The goals for 10 million steps, whatever the ranks.
MOST_CPU_S, MOST_MIB = 15.0, 2_000.0
# Long ago enough that nobody takes the server for one that still writes.
AGE_S = 3_600
# Between the last step of a repetition and the first of the next.
GAP_NS = 4_000_000
STEP = re.compile(rb'\{"step_id":(\d+),"t_ns":(\d+),(.*)')
STEPS_OF_A_REQUEST = ("first_step", "first_token_step", "last_step")
MOMENTS_OF_A_REQUEST = ("arrival_ns", "finished_ns")
LISTS_OF_A_REQUEST = {"preempted_steps": "steps", "kv_wait_ns": "ns"}
SHIPPED = "hash_walk"


class Step(NamedTuple):
    """A line of a step file: its step, its moment, and what follows these."""

    step_id: int
    t_ns: int
    rest: bytes

    @classmethod
    def of(cls, line: bytes) -> Step:
        """Take a line apart. Raises ValueError for one that is no step's."""
        match = STEP.fullmatch(line)
        if match is None:
            raise ValueError(f"not a step: {line[:80]!r}")
        return cls(int(match[1]), int(match[2]), match[3])


class Shift(NamedTuple):
    """Distance of a repetition from the first one: steps, ns, requests."""

    steps: int
    ns: int
    requests: int


def repeat_life(source: Path, folder: Path, steps: int, ranks: int) -> int:
    """Write at least so many steps, as repetitions of a life; return how many."""
    folder.mkdir(parents=True)
    header, engine = _header_and_lines(source / "engine_step.jsonl")
    of_requests, requests = _header_and_lines(source / "engine_request.jsonl")
    of_worker, worker = _header_and_lines(source / "worker_step.r0.jsonl")
    first, last = Step.of(engine[0]), Step.of(engine[-1])
    span_ns = last.t_ns - first.t_ns + GAP_NS
    shifts = [
        Shift(number * len(engine), number * span_ns, number * len(requests))
        for number in range(-(-steps // len(engine)))
    ]
    _write(folder / "engine_step.jsonl", header, _shifted_steps(engine, shifts))
    lines = _shifted_requests(requests, shifts)
    _write(folder / "engine_request.jsonl", of_requests, lines)
    for rank in range(ranks):
        name, lines = f"worker_step.r{rank}.jsonl", _shifted_steps(worker, shifts)
        _write(folder / name, of_worker | {"rank": rank}, lines)
    then = time.time() - AGE_S
    for path in folder.iterdir():
        os.utime(path, (then, then))
    return len(shifts) * len(engine)


def _header_and_lines(path: Path) -> tuple[dict[str, object], list[bytes]]:
    header, *lines = path.read_bytes().splitlines()
    return msgspec.json.decode(header), lines


def _shifted_steps(lines: list[bytes], shifts: list[Shift]) -> Iterator[bytes]:
    steps = [Step.of(line) for line in lines]
    for shift in shifts:
        yield b"".join(
            b'{"step_id":%d,"t_ns":%d,%s\n'
            % (step.step_id + shift.steps, step.t_ns + shift.ns, step.rest)
            for step in steps
        )


def _shifted_requests(lines: list[bytes], shifts: list[Shift]) -> Iterator[bytes]:
    records = [msgspec.json.decode(line) for line in lines]
    for shift in shifts:
        for number, record in enumerate(records):
            moved = record | {"id": f"{shift.requests + number:016x}"}
            for names, by in (
                (STEPS_OF_A_REQUEST, shift.steps),
                (MOMENTS_OF_A_REQUEST, shift.ns),
            ):
                moved |= {name: record[name] + by for name in names if name in record}
            for name, field in LISTS_OF_A_REQUEST.items():
                if values := record.get(name):
                    moved[name] = [value + getattr(shift, field) for value in values]
            yield msgspec.json.encode(moved) + b"\n"


def _write(path: Path, header: dict[str, object], lines: Iterable[bytes]) -> None:
    with path.open("wb", 1 << 22) as file:
        file.write(msgspec.json.encode(header) + b"\n")
        file.writelines(lines)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m benchmarks look`."""
    parser.add_argument("--steps", type=at_least(1), default=10_000_000)
    parser.add_argument("--ranks", type=at_least(1), default=1, help="of the worker")
    parser.add_argument("--out", type=Path, default=Path("runs/look.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, publish the result and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="kvtax_look.") as made:
        folder, records = Path(made), Path(made, "records")
        unpack(folder / "demo")
        steps = repeat_life(
            folder / "demo" / SHIPPED, records, arguments.steps, arguments.ranks
        )
        usage = usage_of("look", str(records), "--out", str(folder / "look.html"))
    row = [f"{steps:,}", str(arguments.ranks), f"{usage.wall_s:.1f}"]
    row += [f"{usage.cpu_s:.1f}", f"{usage.peak_mib:,.0f}"]
    head = ["steps", "ranks", "s", "CPU s", "peak MiB"]
    goal = f"The goal is at most {MOST_CPU_S:g} CPU s and {MOST_MIB:,.0f} MiB."
    results = {"steps": steps, "ranks": arguments.ranks, **usage._asdict()}
    return publish("look", arguments.out, [table(head, [row]), goal], results, {})
