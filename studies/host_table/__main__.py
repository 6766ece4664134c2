# SPDX-License-Identifier: Apache-2.0
"""Table of vLLM's host part of a step, and the error of a simulator without it.

The table is made of the observatory's committed cells: schedule(), update and the
connector by release, connector, running requests, context and cached blocks, each with
an interval over the passes. It is JSON, and has its own JSON Schema in it. Then a fleet
in virtual time (vLLM 0.18.1) is run with a host that takes nothing, with schedule() and
update alone, and with the whole host, to show what that does to TTFT and TPOT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kvtax_fleet.records.host_times import StepTime, StepTimes

from kvtax.axes.matrix import RESULTS as CELLS
from kvtax.records.files import read_document, write_whole
from kvtax.records.observatory_cell import CellRecord, read_cells
from kvtax.report.markdown import table
from kvtax.stats import Estimate
from kvtax.stats.quantiles import median_of_passes
from studies.harness import main, publish
from studies.host_table.host import BLOCK_TOKENS, HELD_TOKENS, LONG_BATCH, host_steps
from studies.host_table.worker import PROFILE
from studies.results import Variant, engines

HELD_BATCH = 8
# The release that runs in virtual time here.
RELEASE = "0.18.1"
CONNECTORS = ("plain", "mooncake_both", "mooncake_both_hash_sync")
RUNNING = (1, 8, 32)


class HostPoint(msgspec.Struct, frozen=True):
    """Times of a step in which all requests decode. The forward is empty."""

    running: int
    """Requests that decode."""
    context_tokens: int
    """Tokens of each before the step."""
    cached_blocks: int
    """Cached block hashes, |cache|, of 16 tokens each."""
    scheduler_us: Estimate
    """`schedule()` and `update_from_output()`, with the connector's scheduler side."""
    connector_us: Estimate
    """All calls of the connector, on both sides."""
    host_us: Estimate
    """`schedule()`, `update_from_output()` and all calls of the connector."""
    step_us: Estimate
    """The whole step: the above, and a worker that prepares an empty forward."""


class HostCell(msgspec.Struct, frozen=True):
    """One connector on one release of vLLM, as the observatory measured it."""

    release: str
    """Of vLLM."""
    connector: str
    """A config in `configs/connectors/`; `plain` has none."""
    machine: str
    """Cores, processor and kernel."""
    command: str
    """The command that measured the cell."""
    commit: str
    """The checkout that it was run in."""
    date_utc: str
    """When."""
    points: list[HostPoint]
    """At each level of running requests, of context and of cached blocks. One of the
    three moves at a time."""
    steps: StepTimes
    """The lines through the points, as runs in virtual time take them."""


class HostTable(
    msgspec.Struct, frozen=True, tag_field="schema", tag="kvtax.host_table/1"
):
    """vLLM's host part of a step, by release and connector.

    An estimate is a median over the passes, with the interval of a sign test.
    """

    json_schema: dict[str, Any]
    """The JSON Schema of this file."""
    cells: list[HostCell]
    """By release and connector."""


def host_table(folder: Path = CELLS) -> HostTable:
    """Make the table of all cells in `folder`. Raises RecordsError."""
    cells = [
        _host_cell(cell)
        for file in sorted(folder.glob("*.jsonl.xz"))
        for cell in read_cells(file)
        if cell.error is None
    ]
    return HostTable(msgspec.json.schema(HostTable), cells)


def _host_cell(cell: CellRecord) -> HostCell:
    facts = cell.provenance
    return HostCell(
        release=cell.release,
        connector=cell.connector,
        machine=f"{facts['cpu_count']} cores of {facts['cpu_model']}, Linux "
        f"{facts['kernel']}",
        command=facts["command_line"],
        commit=facts["git_commit"],
        date_utc=facts["date_utc"],
        points=[
            point
            for axis in ("running", "context", "cache")
            for point in _points(cell, axis)
        ],
        steps=host_steps(cell),
    )


def _points(cell: CellRecord, axis: str) -> list[HostPoint]:
    """Return a point for each level, with medians and intervals over the passes."""
    means = cell.means_us[axis]
    scheduler, step = (np.array(means[name]) for name in ("scheduler_us", "step_us"))
    worker_side = [np.array(us) for name, us in means.items() if name[:7] == "worker."]
    host = scheduler + sum(worker_side, start=np.zeros_like(scheduler))
    columns = (scheduler, np.array(means["connector_us"]), host, step)
    return [
        HostPoint(
            *_place(axis, level),
            *(Estimate.of(median_of_passes(us[:, at]), 1) for us in columns),
        )
        for at, level in enumerate(cell.levels[axis])
    ]


def _place(axis: str, level: int) -> tuple[int, int, int]:
    """Return running requests, tokens of context of each, and cached blocks."""
    if axis == "cache":
        return HELD_BATCH, HELD_TOKENS, level
    running, tokens = (level, HELD_TOKENS) if axis == "running" else (LONG_BATCH, level)
    return running, tokens, running * tokens // BLOCK_TOKENS


def write_table(out: Path, made: HostTable) -> None:
    """Write the table, a line for each cell."""
    encode = msgspec.json.encode
    head = encode(msgspec.structs.replace(made, cells=[]))
    cells = b",\n".join(map(encode, made.cells))
    write_whole(out, head.removesuffix(b"]}") + b"\n" + cells + b"\n]}\n")


def hosts_of(cell: HostCell) -> dict[str, StepTimes]:
    """Return the hosts to compare, by name; the first takes nothing."""
    return {
        "nothing": StepTimes(),
        "schedule() and update": StepTimes(cell.steps.scheduler, StepTime()),
        "all of the host": cell.steps,
    }


def compare(made: HostTable) -> list[dict[str, Any]]:
    """Compute TTFT and TPOT by connector, running requests and host."""
    cells = {cell.connector: cell for cell in made.cells if cell.release == RELEASE}
    variants = {"": Variant([])}
    limit = {"max_model_len": PROFILE.max_model_len}
    with engines("studies.host_table.worker", variants, **limit) as processes:
        rows = []
        for connector in CONNECTORS:
            for running in RUNNING:
                latencies = {
                    host: processes[""].ask(
                        "latencies", running, msgspec.to_builtins(times)
                    )
                    for host, times in hosts_of(cells[connector]).items()
                }
                rows.append({"connector": connector, "running": running} | latencies)
        return rows


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Return the parts of the page: how much lower each is without the host."""
    head = ["connector", "running", "left out", "TTFT", "TPOT"]
    lines = [
        [
            f"`{row['connector']}`",
            str(row["running"]),
            host,
            *(_lower(row, host, name) for name in ("ttft_ms", "tpot_ms")),
        ]
        for row in rows
        for host in list(row)[3:]
    ]
    title = (
        "Mean latencies of a simulator whose host takes nothing, against one with this "
        f"part of vLLM {RELEASE}'s host; one instance of {PROFILE.block_size} tokens "
        "per block, the forward of fleet/configs/profiles/h20-30b-a3b.toml:"
    )
    return [title, table(head, lines)]


def _lower(row: dict[str, Any], host: str, metric: str) -> str:
    nothing, whole = row["nothing"][metric], row[host][metric]
    return f"{nothing:.2f} for {whole:.2f} ms, {100 * (nothing / whole - 1):+.1f} %"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m studies.host_table`."""
    parser.add_argument(
        "--table",
        type=Path,
        default=Path("runs/host_table_cells.json"),
        help="JSON to write",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/host_table.md"))


def run(arguments: argparse.Namespace) -> int:
    """Write the table, simulate, print the result and return the exit code."""
    made = host_table()
    write_table(arguments.table, made)
    # What is read from the file is what others read.
    rows = compare(read_document(arguments.table, HostTable))
    return publish("host_table", arguments.out, report(rows), {"results": rows}, {})


def figure(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    return report(result["results"])[-1]


if __name__ == "__main__":
    main("host_table", __doc__, configure, run)
