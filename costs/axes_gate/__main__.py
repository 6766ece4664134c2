# SPDX-License-Identifier: Apache-2.0
"""Does the gate along the axes catch broken connectors, and leave others alone?

One cell of each of three connectors is what they were. Copies broken in five ways each
must fail against it, along the axis of the fault. Unchanged ones must pass. Prints
Markdown; JSON goes to --out.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from costs.results import write_result
from lab.paths import REPOSITORY
from lab.records.observatory_cell import CellRecord
from lab.serving.connector import Connector
from lab.serving.machine_lock import machine_lock
from lab.serving.own_connector import own_connector
from lab.serving.releases import release
from lab.serving.supervise import exit_on_signals
from lab.stats.markdown import table
from observatory.cell import measure
from observatory.limits import no_worse

CONNECTORS = {
    "Noop": "connectors.noop:NoopConnector",
    "Example": "ExampleConnector",
    "Nixl": "NixlConnector",
}
# ExampleConnector writes KV there; @FOLDER@ goes with the cell.
EXTRA = {"shared_storage_path": "@FOLDER@/kv"}
# The axis along which each grows.
FAULTS = {
    "membership": "running",
    "every_third_step": "running",
    "context": "context",
    "cache": "cache",
    "arrivals": "arrivals",
}
COMMAND = "python -m costs.axes_gate"


def main() -> None:
    parser = argparse.ArgumentParser(
        COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm", default="0.32.0", metavar="VERSION")
    parser.add_argument(
        "--unchanged", type=int, default=40, help="runs of unchanged ones"
    )
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "runs" / "axes_gate.json"
    )
    chosen = parser.parse_args()
    exit_on_signals()
    with machine_lock():
        before = {
            name: _cell(_connector(where), chosen.vllm)
            for name, where in CONNECTORS.items()
        }
        cases = [
            {"connector": name, "fault": fault}
            | _judged(_cell(_broken(name, fault), chosen.vllm), before[name])
            for name in CONNECTORS
            for fault in FAULTS
        ]
        cases += [
            {"connector": name, "fault": None}
            | _judged(_cell(_connector(CONNECTORS[name]), chosen.vllm), old)
            for name, old in islice(cycle(before.items()), chosen.unchanged)
        ]
    facts = before["Noop"].provenance
    text = markdown(cases)
    write_result(chosen.out, {"provenance": facts, "cases": cases}, text)
    print(text)


def markdown(cases: list[dict[str, Any]]) -> str:
    """One row per fault, and one for those without."""
    rows = []
    for fault in [*FAULTS, None]:
        own = [case for case in cases if case["fault"] == fault]
        axis = FAULTS.get(fault)
        right = sum(
            axis in case["broken"] if axis else not case["broken"] for case in own
        )
        wanted = f"fails along {axis}" if axis else "passes"
        rows.append([fault or "unchanged", wanted, f"{right} of {len(own)}"])
    return table(["copy", "must", "did"], rows)


def _broken(name: str, fault: str) -> Connector:
    return _connector(f"costs.axes_gate.broken:Broken{name}", fault=fault)


def _connector(where: str, **extra: str) -> Connector:
    told = json.dumps({"kv_connector_extra_config": EXTRA | extra})
    return own_connector(where, told)[1]


def _cell(connector: Connector, version: str) -> CellRecord:
    name = connector.kv_transfer_config["kv_connector"]
    cell = measure(name, version, connector, release(version), COMMAND)
    if cell.error:
        raise SystemExit(f"axes_gate: {name} did not start\n{cell.error}")
    print(f"axes_gate: {name}, {cell.wall_s:.0f} s", flush=True)
    return cell


def _judged(cell: CellRecord, old: CellRecord) -> dict[str, Any]:
    broken = [check.what for check in no_worse(cell, old, "before") if check.fails]
    axes = {axis for axis in cell.levels for what in broken if f"along {axis}," in what}
    return {"broken": sorted(axes), "what": broken, "wall_s": cell.wall_s}


if __name__ == "__main__":
    main()
