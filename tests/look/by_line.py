# SPDX-License-Identifier: Apache-2.0
"""What `kvtax look` says of one life's steps, computed line by line in plain Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# What vLLM calls before the first step, and the first record has.
AT_START = re.compile(
    "register_|.*handshake_metadata$|set_host_|.*kv_caches?$|bind_gpu_|get_(required|finished_count)"
)
# Fields of a record that are the time of one method.
FIELDS = {
    "build_meta_us": "build_connector_meta",
    "bind_us": "bind_connector_metadata",
    "start_load_kv_us": "start_load_kv",
    "wait_for_save_us": "wait_for_save",
    "get_finished_us": "get_finished",
}


class Figures(NamedTuple):
    """Counts of steps; the connector's share; mean µs of a step and of each method."""

    steps: int
    worker_steps: int
    share: float
    step_us: float
    methods_us: dict[str, float]


def figures(life: Path, is_pipeline: bool = False) -> Figures:
    """Add up the records of a life; with `is_pipeline` each rank is a stage."""
    engine = {step["step_id"]: step for step in records(life / "engine_step.jsonl")}
    engine = {number: step for number, step in engine.items() if "step_us" in step}
    workers = _workers(life, is_pipeline)
    both = [number for number in engine if number in workers]
    sums_us: dict[str, float] = {}
    connector_us = 0.0
    for number, step in engine.items():
        sides = {"scheduler": [step], "worker": workers.get(number, [])}
        for side, of in sides.items():
            for name, us in _calls(of):
                method = f"{side}.{name}"
                sums_us[method] = sums_us.get(method, 0.0) + us
                connector_us += us if number in workers else 0.0
    counts = {"scheduler": len(engine), "worker": len(both)}
    return Figures(
        len(engine),
        len(both),
        connector_us / covered_us(engine[number] for number in both),
        sum(step["step_us"] for step in engine.values()) / len(engine),
        {name: us / counts[name.partition(".")[0]] for name, us in sums_us.items()},
    )


def records(path: Path) -> list[dict]:
    """Read all lines but the header; `calls_us` is the time of each method."""
    header, *lines = map(json.loads, path.read_text().splitlines())
    fields = dict(FIELDS)
    if "get_transfer_results" in header["methods"]:
        fields["get_finished_us"] = "get_transfer_results"
    for line in lines:
        own = {name: line[field] for field, name in fields.items() if field in line}
        line["calls_us"] = own | line.get("connector_self_us", {})
    return lines


def covered_us(steps: Iterable[dict]) -> float:
    """Length of the time in which at least one of the steps ran."""
    covered, until = 0.0, 0.0
    for step in sorted(steps, key=lambda step: step["t_ns"]):
        end = step["t_ns"] + step["step_us"] * 1e3
        covered += max(0.0, end - max(step["t_ns"], until))
        until = max(until, end)
    return covered / 1e3


def _workers(life: Path, is_pipeline: bool) -> dict[int, list[dict]]:
    """By step, the slowest rank of each stage, where all stages have a record."""
    stages: dict[int, dict[int, dict]] = {}
    for path in life.glob("worker_step.r*.jsonl"):
        header = json.loads(path.read_text().partition("\n")[0])
        stage = len(stages) if is_pipeline else header.get("stage") or 0
        slowest = stages.setdefault(stage, {})
        for record in records(path):
            other = slowest.setdefault(record["step_id"], record)
            if record["execute_model_us"] > other["execute_model_us"]:
                slowest[record["step_id"]] = record
    numbers = set.intersection(*(set(of) for of in stages.values()))
    return {n: [of[n] for of in stages.values()] for n in numbers}


def _calls(of: list[dict]) -> Iterable[tuple[str, float]]:
    for record in of:
        for name, us in record["calls_us"].items():
            if not AT_START.match(name):
                yield name, us
