# SPDX-License-Identifier: Apache-2.0
"""Servers that are forked from a zygote beside servers that start cold.

Each round measures each config once forked and once cold, in an order drawn anew, with
the load of a profile. Each server is analysed alone, as the sweep does; the ratios and
differences are between the two of a round, so a busy machine widens their intervals and
does not shift them. Both kinds together are then judged, each as one sweep.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.results import NotMeasured, configure_rounds, publish, turns
from kvtax.engine import provenance
from kvtax.engine.installation import installation
from kvtax.records.estimate import Estimate
from kvtax.records.files import write_document
from kvtax.records.per_config import ConfigEntry
from kvtax.records.run import PLAN_FILE, PlanEntry, RunRecord
from kvtax.report.markdown import table
from kvtax.stats.processes import mean_over_servers
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import LoadedTrial, load_run
from microbench.profile import load_profile
from microbench.workshop import Workshop, workshop

PROFILE = "cpu-smoke"
CONFIGS = ["plain", "mooncake_both_hash_sync"]
COLD, FORKED = "cold", "forked"


def _p50(time: str) -> Callable[[ConfigEntry], float | None]:
    def read(entry: ConfigEntry) -> float | None:
        found = getattr(entry, time)
        return found["p50"] if found else None

    return read


def _slope(metric: str) -> Callable[[ConfigEntry], float | None]:
    def read(entry: ConfigEntry) -> float | None:
        found = entry.slope_us_per_1k_blocks.get(metric)
        return found.value if found else None

    return read


# Forked to cold, as ratios: times and memory of one server.
RATIOS: dict[str, Callable[[ConfigEntry], float | None]] = {
    **{time: _p50(time) for time in ("schedule_us", "overhead_us", "step_us")},
    "pss_mib": lambda entry: entry.pss_mib,
}
# Forked less cold, in us per 1,000 blocks.
DIFFERENCES = {
    f"{metric} slope": _slope(metric) for metric in ("schedule", "connector", "step")
}


def configure(parser: argparse.ArgumentParser) -> None:
    configure_rounds(parser, "zygote", rounds=8, minimum=5)


def run(arguments: argparse.Namespace) -> int:
    profile = msgspec.structs.replace(
        load_profile(PROFILE), configs=CONFIGS, most_repeats=arguments.rounds
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with workshop(folder, profile, installation()) as shop:
            runs = {kind: _new_run(shop) for kind in (COLD, FORKED)}
            cells = [(config, kind) for config in CONFIGS for kind in runs]
            for number, (config, kind) in turns(cells, arguments.rounds):
                _measure(shop, runs[kind], folder / kind, config, number)
        for kind, record in runs.items():
            write_document(folder / kind / PLAN_FILE, record)
        loaded = {kind: load_run(folder / kind) for kind in runs}
    hashes = {name: sha for t in shop.ready.values() for name, sha in t.patches.items()}
    results = {
        "profile": PROFILE,
        "rounds": arguments.rounds,
        "start_s": {kind: _starts_s(trials) for kind, (_, trials) in loaded.items()},
        "verdicts": {kind: _verdicts(*both) for kind, both in loaded.items()},
        "servers": {kind: _servers(*both) for kind, both in loaded.items()},
    }
    results["pairs"] = {
        config: _compare(results["servers"], config) for config in CONFIGS
    }
    return publish("zygote", arguments.out, [_report(results)], results, hashes)


def _new_run(shop: Workshop) -> RunRecord:
    profile = shop.common.profile
    return RunRecord(
        profile=msgspec.to_builtins(profile),
        provenance=provenance.collect({}, "kvtax", shop.common.installed),
        configs={name: trial.connector.report for name, trial in shop.ready.items()},
        plan=[],
    )


def _measure(
    shop: Workshop, run: RunRecord, folder: Path, config: str, number: int
) -> None:
    (planned,) = shop.round(number, [config])
    cold = folder.name == COLD
    record = shop.run(folder / planned.folder, planned, start_cold=cold)
    if record.error:
        raise NotMeasured(f"{config}, {folder.name}, round {number}: {record.error}")
    print(
        f"{number} {config} {folder.name}: ready in {record.ready_s:.1f} s", flush=True
    )
    run.plan.append(PlanEntry(config, number))


def _starts_s(trials: list[LoadedTrial]) -> list[float]:
    ready_s = [trial.facts.ready_s for trial in trials if trial.facts]
    return [round(one, 2) for one in ready_s if one is not None]


def _verdicts(run: RunRecord, trials: list[LoadedTrial]) -> dict[str, dict[str, Any]]:
    entries = analyse(run, trials, None).document.configs
    return {
        name: {"verdict": entry.verdict, "of": entry.verdict_of}
        for name, entry in entries.items()
    }


def _servers(
    run: RunRecord, trials: list[LoadedTrial]
) -> dict[str, dict[str, list[float | None]]]:
    """Return each figure of each server, by config, in the order of rounds."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for trial in sorted(trials, key=lambda trial: trial.repeat):
        entry = analyse(run, [trial], None).document.configs[trial.config]
        for name, read in (RATIOS | DIFFERENCES).items():
            found.setdefault(trial.config, {}).setdefault(name, []).append(read(entry))
    return found


def _compare(
    servers: dict[str, dict[str, dict[str, list[Any]]]], config: str
) -> dict[str, Estimate]:
    """Compare the two servers of each round: ratios by their logs, or differences."""
    found = {}
    for name in RATIOS | DIFFERENCES:
        if None in servers[COLD][config][name]:  # no connector, no slope of its calls
            continue
        cold, forked = (
            np.array(servers[kind][config][name]) for kind in (COLD, FORKED)
        )
        if name in RATIOS:
            logs = mean_over_servers(list(np.log(forked / cold)))
            ends = np.exp([logs.low, logs.high])
            ratio = Estimate(
                float(np.exp(logs.value)), (float(ends[0]), float(ends[1]))
            )
            found[name] = Estimate.of(ratio, 4)
        else:
            found[name] = Estimate.of(mean_over_servers(list(forked - cold)), 3)
    return found


def _report(results: dict[str, Any]) -> str:
    starts = [
        [kind, str(len(all_s)), *(f"{of(all_s):.1f}" for of in (np.median, min, max))]
        for kind, all_s in results["start_s"].items()
    ]
    pairs = [
        [config, name, f"{found:.3f}"]
        for config, figures in results["pairs"].items()
        for name, found in figures.items()
    ]
    verdicts = [
        [config, results["verdicts"][COLD][config]["verdict"], forked["verdict"]]
        for config, forked in results["verdicts"][FORKED].items()
    ]
    return "\n\n".join(
        [
            "The longest forked start includes the imports of the zygote.",
            table(["start", "n", "median s", "least", "most"], starts),
            "Forked to cold as a ratio; slopes as a difference, us per 1,000 blocks.",
            table(["config", "figure", "forked against cold"], pairs),
            table(["config", "verdict cold", "forked"], verdicts),
        ]
    )
