# SPDX-License-Identifier: Apache-2.0
"""A connector's cost per step over another's, by pairs inside one process.

Two servers of the same vLLM differ by more than a connector that does little costs. So
one engine on the null model has the connectors of both configs in turn: four chunks of
steps make a pair of pairs, A B B A. Scheduler, block pool and memory are the same.

    python -m microbench.pairs mooncake_both_fixed noop
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtax.engine.connector import RECORDING, Connector, load_connector
from kvtax.engine.engine_process import EngineProcess
from kvtax.records.estimate import Estimate
from kvtax.records.run import PairedCost, Pairs

# As in the default sweep.
FORWARD_US = 2_000
PROCESSES, QUARTETS = 3, 24
DRAWS = 4_000

Floats = npt.NDArray[np.float64]


def measure_pairs(
    config: str,
    baseline: str,
    processes: int = PROCESSES,
    quartets: int = QUARTETS,
) -> Pairs:
    """Measure `schedule()` and the whole step of two connectors, in turns.

    Takes about 20 s a process. Raises ServerError if an engine does not start.
    """
    connector = load_connector(config)
    load_connector(baseline)
    rounds: list[dict[str, Floats]] = []
    for number in range(processes):
        with (
            tempfile.TemporaryDirectory(prefix="kvtax-pairs-") as folder,
            _engine(Path(folder), connector, config, baseline) as engine,
        ):
            engine.wait_ready()
            rounds.append(engine.ask("time_quartets", quartets, number))
    costs = [_paired(part, [times[part] for times in rounds]) for part in rounds[0]]
    return Pairs(config, baseline, processes, processes * quartets, costs)


def _engine(
    folder: Path, connector: Connector, config: str, baseline: str
) -> EngineProcess:
    patches = [name for name in connector.patches if name not in RECORDING]
    return EngineProcess(
        folder / "engine",
        "microbench.pairs_worker",
        patches,
        config,
        baseline,
        env=connector.env,
        forward_us=FORWARD_US,
    )


def _paired(part: str, by_process: list[Floats]) -> PairedCost:
    """Compare (quartets, 2) us of each process: the baseline's and the config's."""
    order = np.random.default_rng(0)
    more, ratios = [], []
    for _ in range(DRAWS):
        drawn = [
            chosen[order.integers(len(chosen), size=len(chosen))]
            for chosen in (
                by_process[index]
                for index in order.integers(len(by_process), size=len(by_process))
            )
        ]
        times_us = np.concatenate(drawn)
        more.append(float(np.mean(times_us[:, 1] - times_us[:, 0])))
        ratios.append(_ratio(times_us))
    times_us = np.concatenate(by_process)
    return PairedCost(
        part,
        float(np.median(times_us[:, 0])),
        _estimate(float(np.mean(times_us[:, 1] - times_us[:, 0])), more),
        _estimate(_ratio(times_us), ratios),
    )


def _ratio(times_us: Floats) -> float:
    return math.exp(float(np.mean(np.log(times_us[:, 1] / times_us[:, 0]))))


def _estimate(value: float, draws: list[float]) -> Estimate:
    low, high = np.quantile(draws, (0.025, 0.975))
    return Estimate(value, (float(low), float(high)))


def main() -> None:
    """Measure the configs of the command line and print a line per part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("baseline", metavar="BASELINE")
    arguments = parser.parse_args()
    pairs = measure_pairs(arguments.config, arguments.baseline)
    for cost in pairs.costs:
        print(
            f"{cost.part}: {cost.ratio:.3f} times {pairs.baseline}'s "
            f"{cost.baseline_us:.1f} us, {cost.more_us:+.1f} us more "
            f"({pairs.quartets} quartets, {pairs.processes} processes)"
        )


if __name__ == "__main__":
    main()
