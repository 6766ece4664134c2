# SPDX-License-Identifier: Apache-2.0
"""How fast and how big is a fleet in virtual time, and how far above its floor?

The floor is vLLM's engine core alone, stepped without proxy, replayer and records: no
simulation with vLLM's own scheduler is faster. Prints Markdown and writes it with JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from costs.results import facts_list, write_result
from lab.serving import provenance
from lab.serving.engine_process import EngineProcess
from lab.serving.supervise import exit_on_signals
from lab.stats.markdown import table

OUT = Path("runs/virtual-cost.md")
MAX_MODEL_LEN = 65_536
INSTANCES = 8
RUNNING = (8, 32, 60)


def measure(rounds: int) -> list[dict]:
    """A row for each number of running requests. Raises RuntimeError."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EngineProcess(
            Path(folder, "worker"),
            "costs.virtual.worker",
            [],
            max_model_len=MAX_MODEL_LEN,
        ) as process,
    ):
        process.wait_ready()
        for running in RUNNING:
            took = [
                {
                    "floor": process.ask("alone", running),
                    "one": process.ask("fleet", 1, running),
                    "fleet": process.ask("fleet", INSTANCES, running),
                }
                for _ in range(rounds)
            ]
            rows.append({"running": running} | _row(took))
    return rows


def _row(took: list[dict]) -> dict[str, float]:
    def rate(of: str) -> float:
        return median(one[of]["instance_s"] / one[of]["core_s"] for one in took)

    more_mib = median(one["fleet"]["peak_mib"] - one["one"]["peak_mib"] for one in took)
    return {
        "floor_instance_s_per_core_s": rate("floor"),
        "fleet_instance_s_per_core_s": rate("fleet"),
        "mib_per_instance": more_mib / (INSTANCES - 1),
    }


def report(rows: list[dict]) -> str:
    head = ["running requests per instance", "engine core alone", "fleet of 8", "MiB"]
    cells = [
        [
            f"{row['running']}",
            f"{row['floor_instance_s_per_core_s']:.0f}",
            f"{row['fleet_instance_s_per_core_s']:.0f}",
            f"{row['mib_per_instance']:.0f}",
        ]
        for row in rows
    ]
    return (
        "Simulated instance-seconds per core-second, and memory per instance:\n\n"
        + table(head, cells)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m costs.virtual",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    exit_on_signals()
    try:
        rows = measure(arguments.rounds)
    except RuntimeError as error:
        sys.exit(str(error))
    facts = provenance.collect({}, "python -m costs.virtual")
    text = report(rows)
    print(text)
    write_result(
        arguments.out,
        {"provenance": facts, "results": rows},
        f"# costs.virtual\n\n{text}\n\n{facts_list(facts)}\n",
    )


if __name__ == "__main__":
    main()
