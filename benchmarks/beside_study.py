# SPDX-License-Identifier: Apache-2.0
"""Set every figure of the reference study's results beside this project's own.

Reads the committed sweep and runs of three experiments in virtual time (study_sample,
study_thousand and connectors; those that are given); prints Markdown and writes it with
JSON. `kvtax bench study` has the figures of the study's trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.frames import requests_frame

from benchmarks.results import publish
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.report.markdown import table

# Two figures agree if neither is more than a quarter above the other. So do two changes
# that are as near as a change that does not matter (fleet/docs/questions.md), and two
# slopes that are as near as the margin of a verdict.
AGREES_WITHIN = 1.25
NEAR_PERCENT = 5.0
NEAR_US_PER_1K_BLOCKS = 2.0


class Row(NamedTuple):
    """A figure of the study and ours. `here` None: nothing here has it; `note` why.

    Figures that are no further apart than `near` agree.
    """

    what: str
    study: float | None
    here: float | None
    note: str = ""
    near: float = 0.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs to read, and --out for the page."""
    for name in ("sample", "thousand", "connectors"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/beside_study.md"))


def run(arguments: argparse.Namespace) -> int:
    """Print and write the page. Returns the exit code. Raises RecordsError."""
    sections: dict[str, list[Row]] = {}
    if arguments.sample is not None:
        sample = _analysis(arguments.sample, "study_sample", SAMPLE)["arms"]
        sections |= {
            "R: 200 requests, at most one session per GPU": [*_replay(sample)],
            "R: by class of new tokens": [*_classes(sample)],
            "R: what offloading does": [*_elastic(sample)],
            "R: the prefix cache": [*_cache(sample)],
        }
    if arguments.thousand is not None:
        sections["R: 1,000 requests"] = [*_thousand(arguments.thousand)]
    sections["H5: cost per step"] = [*_steps()]
    sections["N: what the framework's part is made of"] = [*_framework()]
    parts = [
        f"Agrees: within a factor of {AGREES_WITHIN:g}, {NEAR_PERCENT:g} points of a "
        f"change in %, or {NEAR_US_PER_1K_BLOCKS:g} µs of a slope. Times in s, "
        "TPOT in ms."
    ]
    for title, rows in sections.items():
        parts += [f"## {title}", rows_table(rows)]
    if arguments.connectors is not None:
        title = "N: what the substrate costs"
        sections[title], connectors = _connectors(arguments.connectors)
        parts += [f"## {title}", SUBSTRATE_NOTE, connectors]
    results = {title: [r._asdict() for r in rows] for title, rows in sections.items()}
    return publish("beside_study", arguments.out, parts, {"rows": results}, {})


def rows_table(rows: list[Row]) -> str:
    """Format rows as Markdown."""
    return table(
        ["", "study", "here", "", "note"],
        [[row.what, _text(row.study), _text(row.here), *_verdict(row)] for row in rows],
    )


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.4g}"


def _verdict(row: Row) -> tuple[str, str]:
    if row.study is None or row.here is None:
        return "", row.note
    same = agrees(row.study, row.here, row.near)
    return ("agrees" if same else "differs"), row.note


def agrees(study: float, here: float, near: float = 0.0) -> bool:
    """Return whether figures are `near`, or of one sign and within AGREES_WITHIN."""
    if abs(study - here) <= near:
        return True
    if study * here <= 0:
        return study == here
    less, more = sorted((abs(study), abs(here)))
    return more / less <= AGREES_WITHIN


def _analysis(run: Path, experiment: str, arms: Iterable[str]) -> Any:
    """Read a run's analysis. Raises RecordsError if it is no run of `experiment`."""
    file = run / "analysis.json"
    if not file.is_file():
        raise RecordsError(
            f"{file} is not there: give a finished run of "
            f"fleet/configs/experiments/{experiment}.toml"
        )
    document = msgspec.json.decode(file.read_bytes())
    if missing := set(arms) - document.get("arms", {}).keys():
        raise RecordsError(
            f"{file} has no {', '.join(sorted(missing))}: give a run of "
            f"fleet/configs/experiments/{experiment}.toml"
        )
    return document


def _level(arm: Any, metric: str, quantile: str, kind: str = "all") -> float | None:
    """Return a level over all requests: TTFT and E2E in s, TPOT in ms."""
    level = arm["latency"]["all"].get(kind, {}).get(metric, {}).get(quantile)
    if level is None:
        return None
    return float(level["value"]) / (1 if metric == "tpot_ms" else 1e3)


def _percent(new: float | None, old: float | None) -> float | None:
    return None if new is None or not old else 100 * (new / old - 1)


LEVELS = (
    ("TTFT p50", "ttft_ms", "p50"),
    ("TTFT p90", "ttft_ms", "p90"),
    ("TPOT p90", "tpot_ms", "p90"),
    ("E2E p50", "e2e_ms", "p50"),
)


SAMPLE = ("linear@1", "linear@2", "lmetric@1", "elastic@1", "round_robin@1")


def _replay(arms: dict[str, Any]) -> Iterator[Row]:
    stated = {
        "linear@1": (1.075, 9.384, 76, 5.075),
        "lmetric@1": (1.099, 9.392, 73, 5.205),
        "elastic@1": (1.018, 11.312, 85, 6.977),
    }
    for arm, figures in stated.items():
        ok = arms[arm]["outcomes"]
        failed = {"linear@1": 1.0, "lmetric@1": 1.0, "elastic@1": 2.5}[arm]
        yield Row(
            f"{arm[:-2]}: failed, %",
            failed,
            100 * (ok["n"] - ok["ok"]) / ok["n"],
            "the client's protocol error, and time-outs at D",
        )
        for (name, metric, quantile), study in zip(LEVELS, figures, strict=True):
            yield Row(f"{arm[:-2]}: {name}", study, _level(arms[arm], metric, quantile))
    old, new = (_level(arms[arm], "e2e_ms", "p50") for arm in ("linear@1", "lmetric@1"))
    yield _change("LMetric's E2E p50, % over linear", -0.3, _percent(new, old))
    once, twice = (
        _level(arms[arm], "tpot_ms", "p90") for arm in ("linear@1", "linear@2")
    )
    yield Row("TPOT p90, 8 sessions", 75, once)
    yield Row("TPOT p90, 16 sessions", 103, twice)
    yield _change("TPOT p90, % from 8 to 16", 38, _percent(twice, once))


def _classes(arms: dict[str, Any]) -> Iterator[Row]:
    linear = {
        "WARM": (23, 0.137, 0.262, 61),
        "MEDIUM": (25, 0.921, 1.846, 79),
        "HEAVY": (32, 2.660, 6.278, 76),
        "HUGE": (19, 9.587, 30.415, 102),
    }
    yield from _class_rows(arms["linear@1"], "linear", linear)
    # Its third row, HEAVY and HUGE together, has no level in a run's analysis.
    elastic = {"WARM": (23, 0.142, 0.279, 72), "MEDIUM": (25, 0.766, 1.814, 197)}
    yield from _class_rows(arms["elastic@1"], "elastic", elastic)


def _class_rows(
    arm: Any, name: str, stated: dict[str, tuple[float, ...]]
) -> Iterator[Row]:
    of_all = arm["latency"]["all"]
    for kind, (share, *figures) in stated.items():
        n = of_all.get(kind, {}).get("n", 0)
        label = f"{name}, {kind}"
        yield Row(f"{label}: % of requests", share, 100 * n / of_all["all"]["n"])
        for (level, metric, quantile), study in zip(LEVELS[:3], figures, strict=True):
            found = _level(arm, metric, quantile, kind)
            yield Row(f"{label}: {level}", study, found)


def _elastic(arms: dict[str, Any]) -> Iterator[Row]:
    old, new = arms["linear@1"], arms["elastic@1"]
    for (name, metric, quantile), study in zip(
        LEVELS, (-5.3, 20.5, 11.6, 37.5), strict=True
    ):
        change = _percent(_level(new, metric, quantile), _level(old, metric, quantile))
        yield _change(f"{name}, %", study, change)
    offloads = new["offloads"]
    phases = {name: level["p50"] for name, level in offloads["phases_ms"].items()}
    for name, phase, study in (
        ("queue and prefill on P, p50", "prefill", 6.3),
        ("transfer and start on D, p50", "handover", 0.8),
    ):
        found = phases[phase]["value"] / 1e3 if phases[phase] else None
        yield Row(name, study, found)
    yield Row(
        "requests offloaded, %", None, 100 * offloads["begun"] / offloads["requests"]
    )


def _cache(arms: dict[str, Any]) -> Iterator[Row]:
    def apc(arm: str) -> list[float]:
        counted = arms[arm]["repeats"][0]["apc"]["instances"].values()
        return sorted((100 * one["apc"] for one in counted), reverse=True)

    stated = (60.6, 58.3, 43.2, 28.9, 24.0, 16.6, 13.9, 0.0)
    for place, (study, found) in enumerate(
        zip(stated, apc("lmetric@1"), strict=True), 1
    ):
        yield Row(f"LMetric: APC of instance {place}, %", study, found)
    overall = {
        arm: 100 * arms[arm]["repeats"][0]["apc"]["overall"]["apc"]
        for arm in ("linear@1", "round_robin@1")
    }
    gain = overall["linear@1"] - overall["round_robin@1"]
    yield _change("linear's APC over round-robin's, points", 24, gain)
    for quantile in ("p50", "p90"):
        old, new = (
            _level(arms[arm], "ttft_ms", quantile)
            for arm in ("round_robin@1", "linear@1")
        )
        note = "the study does not say of which quantile"
        yield _change(f"linear's TTFT {quantile}, %", -60, _percent(new, old), note)


def _thousand(run: Path) -> Iterator[Row]:
    document = _analysis(run, "study_thousand", ["linear@1"])
    repeat = document["arms"]["linear@1"]["repeats"][0]
    yield Row("token imbalance", 1.24, repeat["imbalance"]["max_over_min"])
    runs = [one for one in read_run(run) if one.info.arm == "linear@1"]
    requests = requests_frame(runs[:1])
    by_instance = requests.group_by("instance").agg(
        pl.col("usage_prompt_tokens").sum().alias("tokens")
    )
    order = by_instance.sort("tokens")["instance"].to_list()
    for what, names, study in (
        ("two heaviest instances: TTFT p50", order[-2:], 1.42),
        ("two lightest instances: TTFT p50", order[:2], 0.83),
    ):
        own = requests.filter(pl.col("instance").is_in(names))
        note = "by prompt tokens, most of which are cached where many turns go"
        yield Row(what, study, float(own["ttft_ms"].quantile(0.5) or 0) / 1e3, note)
    tpot = requests.group_by("instance").agg(pl.col("tpot_ms").quantile(0.9))["tpot_ms"]
    yield Row("TPOT p90 of the slowest instance", 77, _number(tpot.max()))
    yield Row("TPOT p90 of the fastest instance", 70, _number(tpot.min()))
    rules = {rule["every_turns"]: rule for rule in document["migration"]["policies"]}
    for every, imbalance, moves, kv_s in (
        (None, 1.24, 0, 0),
        (10, 1.21, 10, 15),
        (5, 1.20, 20, 30),
    ):
        rule = rules[every]
        name = f"migration every {every} turns" if every else "no migration"
        note = "from tokens served so far; the study does not state its rule"
        yield Row(f"{name}: imbalance", imbalance, rule["max_over_min"], note)
        yield Row(f"{name}: moves", moves, rule["migrations"])
        moved_s = rule["transfer_ms_total"] / 1e3
        yield Row(f"{name}: KV time, s", kv_s, moved_s, "over 100 Gb/s here")


def _change(what: str, study: float | None, here: float | None, note: str = "") -> Row:
    return Row(what, study, here, note, NEAR_PERCENT)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


SWEEPS = {
    "one H100": REPOSITORY / "docs" / "results" / "gpu" / "per_config.json",
    "a CPU host": REPOSITORY / "per_config.json",
}
STEP_COSTS = (
    ("Mooncake with the walk", "mooncake_both_hash_sync", 85.6, 1_528),
    ("no-op", "noop", -0.8, 79),
    ("plain", "plain", 1.0, 84),
)


def _steps() -> Iterator[Row]:
    for where, path in SWEEPS.items():
        configs = msgspec.json.decode(path.read_bytes())["configs"]
        for name, config, slope, level in STEP_COSTS:
            found = configs[config]
            # Not reached on the H100.
            if found["schedule_us"] is None:
                continue
            ours = found["slope_us_per_1k_blocks"]["schedule"]["value"]
            what = f"{where}, {name}: µs per 1,000 blocks"
            yield Row(what, slope, ours, near=NEAR_US_PER_1K_BLOCKS)
            p50 = found["schedule_us"]["p50"]
            yield Row(f"{where}, {name}: schedule p50, µs", level, p50)
        walk = configs["mooncake_both_hash_sync"]
        share = 100 * walk["build_meta_us"]["p50"] / walk["schedule_us"]["p50"]
        yield Row(f"{where}: build_meta, % of schedule", 94, share)
        for quantile, study in (("p50", 180), ("p90", 257), ("p99", 333)):
            level = walk["get_finished_us"][quantile]
            yield Row(f"{where}: get_finished {quantile}, µs", study, level)


# Of NIXL's calls, those that the study names as the framework's part, and the others.
FRAMEWORK = {
    "metadata": ("scheduler.build_connector_meta", "worker.bind_connector_metadata"),
    "KV buffers": ("worker.start_load_kv", "worker.wait_for_save"),
    "what has arrived": (
        "worker.get_finished",
        "worker.get_block_ids_with_load_errors",
        "worker.get_kv_connector_stats",
    ),
    "blocks freed later": ("scheduler.request_finished_all_groups",),
}


def _framework() -> Iterator[Row]:
    """Yield NIXL's calls by purpose, in % of plain's step, and its memory."""
    path = SWEEPS["a CPU host"]
    configs = msgspec.json.decode(path.read_bytes())["configs"]
    plain, nixl = configs["plain"], configs["nixl_both"]
    step_us = plain["attribution_us"]["step"]
    for what, methods in FRAMEWORK.items():
        us = sum(nixl["methods"][method]["us_per_step"] for method in methods)
        note = "no block waits: nothing is sent" if what == "blocks freed later" else ""
        yield Row(f"{what}, % of plain's step", None, 100 * us / step_us, note)
    threads = nixl["threads"].keys() - configs["noop"]["threads"].keys()
    us = sum(nixl["threads"][thread]["us_per_step"] or 0 for thread in threads)
    note = "CPU time, beside the step: " + ", ".join(sorted(threads))
    yield Row("its own threads, % of plain's step", None, 100 * us / step_us, note)
    for config in ("nixl_both", "mooncake_both"):
        found = [one.get("peak_rss_mib") for one in (configs[config], plain)]
        more = None if None in found else found[0] - found[1]
        yield Row(f"{config}: memory over plain, MiB", None, more, "of the host")


# The study's levels of plain vLLM, and its changes in percent, or points, by connector.
SUBSTRATE = {
    "plain": (7.35, 17.1, 18.03, 3.667, 79.4, None),
    "noop": (None,) * 6,
    "nixl": (37.9, 15.5, 17.4, 0.2, -0.3, 5.58),
    "mooncake": (None,) * 6,
    "mooncake_hash_walk": (45.3, 24.5, 27.0, 19.0, -1.1, 8.57),
    "mooncake_fixed": (None,) * 6,
}
CHANGES = (
    "TTFT p90, %",
    "TPOT p90, %",
    "E2E p90, %",
    "hotspot, %",
    "APC, points",
    "interference",
)
# Share of the requests that a transfer helps.
TRIGGER_SHARE = 0.005
SUBSTRATE_NOTE = (
    "Levels of `plain`, changes of the others against it; the study's in parentheses. "
    "Hotspot: tokens under way on the busiest instance over the mean of all, over "
    "time. Interference is not defined there; here ms of TPOT per 1,000 prefill tokens "
    "beside. Mean E2E: request by request, with its 95 % interval over orders. A "
    "transfer must save as much, in requests' mean E2E, as all requests lose, if "
    f"{TRIGGER_SHARE:.1%} of them have one."
)


def _connectors(run: Path) -> tuple[list[Row], str]:
    """Return the figures of each connector, and a table with a row for each."""
    document = _analysis(run, "connectors", [f"{name}@15" for name in SUBSTRATE])
    # One load, so that an arm's name without it is unique.
    arms = {name.partition("@")[0]: arm for name, arm in document["arms"].items()}
    means = {
        one["arm"].partition("@")[0]: one["paired"]["e2e_ms"]["percent"]
        for one in document["comparisons"]
    }
    plain = _substrate_levels(arms["plain"])
    rows, lines = [], []
    for name, stated in SUBSTRATE.items():
        here = _substrate_levels(arms[name])
        if name != "plain":
            here = [*map(_percent, here[:4], plain[:4]), here[4] - plain[4], here[5]]
        found = [
            Row(f"{name}: {what}", study, figure, near=_near(name, what))
            for what, study, figure in zip(CHANGES, stated, here, strict=True)
        ]
        lines.append([f"`{name}`", *map(_cell, found), *_of_the_mean(means.get(name))])
        rows += found
    heads = ["", *CHANGES, "mean E2E, %", "a transfer must save, requests' E2E"]
    return rows, table(heads, lines)


def _near(name: str, what: str) -> float:
    """Return how near levels (plain's, and interference) and changes agree."""
    return 0.0 if name == "plain" or what == "interference" else NEAR_PERCENT


def _cell(row: Row) -> str:
    stated = "" if row.study is None else f" ({_text(row.study)})"
    return f"{_text(row.here)}{stated}"


def _of_the_mean(change: Any) -> tuple[str, str]:
    """Format a change in %, and what each transfer must save to make up for it."""
    if change is None:
        return "", ""
    low, high = change["ci95"]
    must_save = change["value"] / 100 / TRIGGER_SHARE
    return f"{change['value']:+.1f} [{low:+.1f}, {high:+.1f}]", f"{must_save:.2g}"


def _substrate_levels(arm: Any) -> list[Any]:
    """Return what CHANGES are of: s, ms, s, a ratio, %, ms per 1,000 tokens."""
    latencies = [_level(arm, name, "p90") for name in ("ttft_ms", "tpot_ms", "e2e_ms")]
    slope = arm["interference"] and arm["interference"]["slope_ms_per_ktoken"]["value"]
    return [*latencies, _hotspot(arm), 100 * _apc(arm), slope]


def _hotspot(arm: Any) -> float:
    found = [
        repeat["hotspot"]["mean"] for repeat in arm["repeats"] if repeat["hotspot"]
    ]
    return sum(found) / len(found)


def _apc(arm: Any) -> float:
    found = [repeat["apc"]["overall"]["apc"] for repeat in arm["repeats"]]
    return sum(found) / len(found)
