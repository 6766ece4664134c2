# SPDX-License-Identifier: Apache-2.0
"""What a connector adds to schedule(), by part, and how much two processes differ."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.stats.interval import Interval
from lab.stats.markdown import TIMES, number, table
from lab.stats.rounds import difference, ratio

Floats = NDArray[np.float64]

# The connectors that take turns within a process: the process's own and the no-op one.
FLOOR, AGAIN, LISTENED, OWN = "no-op", "no-op again", "no-op, listened", "own"
QUANTILES = {"p50": 0.5, "p90": 0.9}


class Process(NamedTuple):
    """The `number`-th process of a config."""

    config: str
    number: int


# By process, a round's times by mode, (3, steps) us: schedule() before, in and after
# build_connector_meta.
Samples = dict[Process, list[dict[str, Floats]]]


class Row(msgspec.Struct):
    """What a part of schedule() takes with the no-op connector, and how much more in
    each other mode. `noop_us` and `own_times_noop` are by quantile, `more_us` by
    quantile and mode."""

    config: str
    part: str
    rounds: int
    noop_us: dict[str, float]
    more_us: dict[str, dict[str, Interval]]
    own_times_noop: dict[str, Interval]


def parts_us(times_us: Floats) -> dict[str, Floats]:
    """(steps,) by part, from (3, steps)."""
    before, build_meta, after = times_us
    return {
        "schedule()": before + build_meta + after,
        "build_connector_meta": build_meta,
        "the rest": before + after,
    }


def rows(samples: Samples) -> list[Row]:
    found = []
    for config in dict.fromkeys(process.config for process in samples):
        rounds = [r for p, of in samples.items() if p.config == config for r in of]
        found += [_row(config, part, rounds) for part in parts_us(np.zeros((3, 1)))]
    return found


def _row(config: str, part: str, rounds: list[dict[str, Floats]]) -> Row:
    levels = {
        name: {
            mode: np.array([np.quantile(parts_us(of[mode])[part], q) for of in rounds])
            for mode in rounds[0]
        }
        for name, q in QUANTILES.items()
    }
    return Row(
        config,
        part,
        len(rounds),
        {name: float(np.median(us[FLOOR])) for name, us in levels.items()},
        {
            name: {
                mode: Interval.of(difference(us[mode], us[FLOOR]))
                for mode in (AGAIN, LISTENED, OWN)
            }
            for name, us in levels.items()
        },
        {name: Interval.of(ratio(us[OWN], us[FLOOR])) for name, us in levels.items()},
    )


def report(found: list[Row], samples: Samples) -> str:
    """Two Markdown tables."""
    head = ["config", "part", "no-op p50 µs", "more: no-op again"]
    head += ["listened", "own", f"own {TIMES} no-op", "p90: no-op again", "own"]
    body = []
    for row in found:
        p50, p90 = (row.more_us[name] for name in QUANTILES)
        body.append(
            [
                f"`{row.config}`",
                row.part,
                number(row.noop_us["p50"]),
                *(f"{p50[mode]:+.1f}" for mode in (AGAIN, LISTENED, OWN)),
                f"{row.own_times_noop['p50']:.3f}",
                *(f"{p90[mode]:+.1f}" for mode in (AGAIN, OWN)),
            ]
        )
    return f"{table(head, body)}\n\n{_processes_table(samples)}"


def _processes_table(samples: Samples) -> str:
    """p50 of schedule() in each process while it has the no-op connector."""
    body = []
    for process, rounds in samples.items():
        steps = np.concatenate([parts_us(of[FLOOR])["schedule()"] for of in rounds])
        cells = [number(float(np.median(steps))), f"{len(steps):,}"]
        body.append([f"`{process.config}`", str(process.number), *cells])
    head = ["process of", "number", "schedule() with the no-op connector, p50 µs"]
    return table([*head, "steps"], body)
