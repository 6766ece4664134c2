# SPDX-License-Identifier: Apache-2.0
"""Does the gate along the axes catch broken connectors, and leave others alone?

One cell of each of three connectors is what they were. Copies broken in five ways each
must fail against it, along the axis of the fault. Unchanged ones must pass. Prints
Markdown; JSON goes to --out.
"""

from __future__ import annotations

import argparse
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.results import NotMeasured, publish
from kvtax.axes.cell import measure
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.releases import release
from kvtax.proc.machine_lock import machine_lock
from kvtax.records.observatory_cell import CellRecord
from kvtax.report.markdown import table
from kvtax.verdict.limits import check_since

# Configs of configs/connectors/, and their copies in axes_gate_connectors.py.
CONNECTORS = {
    "noop": "BrokenNoop",
    "nixl_both": "BrokenNixl",
    "mooncake_both": "BrokenMooncake",
}
# The axis along which each grows.
FAULTS = {
    "membership": "running",
    "every_third_step": "running",
    "context": "context",
    "cache": "cache",
    "arrivals": "arrivals",
}
COMMAND = "kvtax bench axes_gate"


def markdown(cases: list[dict[str, Any]]) -> str:
    """One row per fault, and one for those without."""
    rows = []
    for fault in [*FAULTS, None]:
        own = [case for case in cases if case["fault"] == fault]
        axis = FAULTS[fault] if fault else None
        right = sum(
            axis in case["broken"] if axis else not case["broken"] for case in own
        )
        wanted = f"fails along {axis}" if axis else "passes"
        rows.append([fault or "unchanged", wanted, f"{right} of {len(own)}"])
    return table(["copy", "must", "did"], rows)


def _broken(name: str, fault: str) -> Connector:
    healthy = load_connector(name)
    transfer = healthy.kv_transfer_config or {}
    extra = transfer.get("kv_connector_extra_config", {}) | {"fault": fault}
    copy = {
        "kv_connector": CONNECTORS[name],
        "kv_connector_module_path": "benchmarks.axes_gate_connectors",
        "kv_connector_extra_config": extra,
    }
    return msgspec.structs.replace(healthy, kv_transfer_config=transfer | copy)


def _cell(name: str, connector: Connector, version: str) -> CellRecord:
    cell = measure(name, version, connector, release(version), COMMAND)
    if cell.error:
        raise NotMeasured(f"axes_gate: {name} did not start\n{cell.error}")
    kind = (connector.kv_transfer_config or {})["kv_connector"]
    print(f"axes_gate: {kind}, {cell.wall_s:.0f} s", flush=True)
    return cell


def _judged(cell: CellRecord, old: CellRecord) -> dict[str, Any]:
    broken = [check.what for check in check_since(cell, old, "before") if check.fails]
    axes = {axis for axis in cell.levels for what in broken if f"along {axis}," in what}
    return {"broken": sorted(axes), "what": broken, "wall_s": cell.wall_s}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvtax bench axes_gate`."""
    parser.add_argument("--vllm", default="0.32.0", metavar="VERSION")
    parser.add_argument(
        "--unchanged", type=int, default=40, help="runs of unchanged ones"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/axes_gate.md"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the result and return the exit code."""
    with machine_lock():
        before = {
            name: _cell(name, load_connector(name), arguments.vllm)
            for name in CONNECTORS
        }
        cases = [
            {"connector": name, "fault": fault}
            | _judged(_cell(name, _broken(name, fault), arguments.vllm), before[name])
            for name in CONNECTORS
            for fault in FAULTS
        ]
        cases += [
            {"connector": name, "fault": None}
            | _judged(_cell(name, load_connector(name), arguments.vllm), old)
            for name, old in islice(cycle(before.items()), arguments.unchanged)
        ]
    hashes = before["noop"].provenance["patch_hashes"]
    parts, installed = [markdown(cases)], release(arguments.vllm)
    name, results = "axes_gate", {"cases": cases}
    return publish(name, arguments.out, parts, results, hashes, installed)
