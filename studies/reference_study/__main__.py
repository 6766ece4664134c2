# SPDX-License-Identifier: Apache-2.0
"""Set every figure of the reference study's results beside this project's own.

Reads the committed sweep and runs of three experiments in virtual time (study_sample,
study_thousand and connectors; those that are given); prints Markdown and writes it with
JSON. `python -m studies.reference_study.sample` has the figures of its trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.frames import requests_frame

from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.report.markdown import table
from studies.harness import main, publish, rows_table
from studies.reference_study.reference import figures

# Two figures agree if neither is more than a quarter above the other. So do two changes
# that are as near as a change that does not matter (studies/questions), and two
# slopes that are as near as the margin of a verdict.
AGREES_WITHIN = 1.25
NEAR_PERCENT = 5.0
NEAR_US_PER_1K_BLOCKS = 2.0


class Row(msgspec.Struct):
    """A figure of the study and ours. `here` None: nothing here has it; `note` why.

    Figures that are no further apart than `near` agree.
    """

    what: str
    study: float | None
    here: float | None
    note: str = ""
    near: float = 0.0

    @property
    def stated(self) -> str:
        """The study's figure."""
        return _text(self.study)

    @property
    def found(self) -> str:
        """The figure here."""
        return _text(self.here)

    @property
    def verdict(self) -> str:
        """The verdict on the two figures; nothing without both."""
        if self.study is None or self.here is None:
            return ""
        same = agrees(self.study, self.here, self.near)
        return "agrees" if same else "differs"


COLUMNS = {
    "": "{row.what}",
    "study": "{row.stated}",
    "here": "{row.found}",
    "verdict": "{row.verdict}",
    "note": "{row.note}",
}


class Section:
    """A section of the study, with its figures of reference.csv by name."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._figures = figures(title)

    def row(
        self,
        what: str,
        here: float | None,
        note: str = "",
        near: float = 0.0,
        figure: str = "",
    ) -> Row:
        """Set `here` beside the study's figure `figure`, or `what`."""
        return Row(what, self._figures.get(figure or what), here, note, near)

    def change(self, what: str, here: float | None, note: str = "") -> Row:
        """Set a change in % or points beside the study's."""
        return self.row(what, here, note, NEAR_PERCENT)


REPLAY = Section("R: 200 requests, at most one session per GPU")
BY_CLASS = Section("R: by class of new tokens")
OFFLOADING = Section("R: what offloading does")
CACHE = Section("R: the prefix cache")
THOUSAND = Section("R: 1,000 requests")
STEPS = Section("H5: cost per step")
FRAMEWORK_PART = Section("N: what the framework's part is made of")
SUBSTRATE_PART = Section("N: what the substrate costs")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs to read, and --out for the page."""
    for name in ("sample", "thousand", "connectors"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/reference_study.md"))


def run(arguments: argparse.Namespace) -> int:
    """Print and write the page. Returns the exit code. Raises RecordsError."""
    sections: dict[str, list[Row]] = {}
    if arguments.sample is not None:
        sample = _analysis(arguments.sample, "study_sample", SAMPLE)["arms"]
        sections |= {
            REPLAY.title: [*_replay(sample)],
            BY_CLASS.title: [*_classes(sample)],
            OFFLOADING.title: [*_elastic(sample)],
            CACHE.title: [*_cache(sample)],
        }
    if arguments.thousand is not None:
        sections[THOUSAND.title] = [*_thousand(arguments.thousand)]
    sections[STEPS.title] = [*_steps()]
    sections[FRAMEWORK_PART.title] = [*_framework()]
    parts = [
        f"Agrees: within a factor of {AGREES_WITHIN:g}, {NEAR_PERCENT:g} points of a "
        f"change in %, or {NEAR_US_PER_1K_BLOCKS:g} µs of a slope. Times in s, "
        "TPOT in ms."
    ]
    for title, rows in sections.items():
        parts += [f"## {title}", rows_table(rows, COLUMNS)]
    if arguments.connectors is not None:
        title = SUBSTRATE_PART.title
        sections[title], connectors = _connectors(arguments.connectors)
        parts += [f"## {title}", SUBSTRATE_NOTE, connectors]
    return publish("reference_study", arguments.out, parts, {"rows": sections}, {})


def _text(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.4g}"


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


CLASSES = ("WARM", "MEDIUM", "HEAVY", "HUGE")
SAMPLE = ("linear@1", "linear@2", "lmetric@1", "elastic@1", "round_robin@1")


def _replay(arms: dict[str, Any]) -> Iterator[Row]:
    for policy in ("linear", "lmetric", "elastic"):
        arm = arms[f"{policy}@1"]
        ok = arm["outcomes"]
        yield REPLAY.row(
            f"{policy}: failed, %",
            100 * (ok["n"] - ok["ok"]) / ok["n"],
            "the client's protocol error, and time-outs at D",
        )
        for name, metric, quantile in LEVELS:
            yield REPLAY.row(f"{policy}: {name}", _level(arm, metric, quantile))
    old, new = (_level(arms[arm], "e2e_ms", "p50") for arm in ("linear@1", "lmetric@1"))
    yield REPLAY.change("LMetric's E2E p50, % over linear", _percent(new, old))
    once, twice = (
        _level(arms[arm], "tpot_ms", "p90") for arm in ("linear@1", "linear@2")
    )
    yield REPLAY.row("TPOT p90, 8 sessions", once)
    yield REPLAY.row("TPOT p90, 16 sessions", twice)
    yield REPLAY.change("TPOT p90, % from 8 to 16", _percent(twice, once))


def _classes(arms: dict[str, Any]) -> Iterator[Row]:
    yield from _class_rows(arms["linear@1"], "linear", CLASSES)
    # Its third row, HEAVY and HUGE together, has no level in a run's analysis.
    yield from _class_rows(arms["elastic@1"], "elastic", CLASSES[:2])


def _class_rows(arm: Any, name: str, classes: Iterable[str]) -> Iterator[Row]:
    of_all = arm["latency"]["all"]
    for kind in classes:
        n = of_all.get(kind, {}).get("n", 0)
        label = f"{name}, {kind}"
        share = 100 * n / of_all["all"]["n"]
        yield BY_CLASS.row(f"{label}: % of requests", share)
        for level, metric, quantile in LEVELS[:3]:
            found = _level(arm, metric, quantile, kind)
            yield BY_CLASS.row(f"{label}: {level}", found)


def _elastic(arms: dict[str, Any]) -> Iterator[Row]:
    old, new = arms["linear@1"], arms["elastic@1"]
    for name, metric, quantile in LEVELS:
        change = _percent(_level(new, metric, quantile), _level(old, metric, quantile))
        yield OFFLOADING.change(f"{name}, %", change)
    offloads = new["offloads"]
    phases = {name: level["p50"] for name, level in offloads["phases_ms"].items()}
    for name, phase in (
        ("queue and prefill on P, p50", "prefill"),
        ("transfer and start on D, p50", "handover"),
    ):
        found = phases[phase]["value"] / 1e3 if phases[phase] else None
        yield OFFLOADING.row(name, found)
    share = 100 * offloads["begun"] / offloads["requests"]
    yield OFFLOADING.row("requests offloaded, %", share)


def _cache(arms: dict[str, Any]) -> Iterator[Row]:
    def apc(arm: str) -> list[float]:
        counted = arms[arm]["repeats"][0]["apc"]["instances"].values()
        return sorted((100 * one["apc"] for one in counted), reverse=True)

    for place, found in enumerate(apc("lmetric@1"), 1):
        yield CACHE.row(f"LMetric: APC of instance {place}, %", found)
    overall = {
        arm: 100 * arms[arm]["repeats"][0]["apc"]["overall"]["apc"]
        for arm in ("linear@1", "round_robin@1")
    }
    gain = overall["linear@1"] - overall["round_robin@1"]
    yield CACHE.change("linear's APC over round-robin's, points", gain)
    for quantile in ("p50", "p90"):
        old, new = (
            _level(arms[arm], "ttft_ms", quantile)
            for arm in ("round_robin@1", "linear@1")
        )
        note = "the study does not say of which quantile"
        yield CACHE.change(f"linear's TTFT {quantile}, %", _percent(new, old), note)


def _thousand(run: Path) -> Iterator[Row]:
    document = _analysis(run, "study_thousand", ["linear@1"])
    repeat = document["arms"]["linear@1"]["repeats"][0]
    yield THOUSAND.row("token imbalance", repeat["imbalance"]["max_over_min"])
    runs = [one for one in read_run(run) if one.info.arm == "linear@1"]
    requests = requests_frame(runs[:1])
    by_instance = requests.group_by("instance").agg(
        pl.col("usage_prompt_tokens").sum().alias("tokens")
    )
    order = by_instance.sort("tokens")["instance"].to_list()
    for what, names in (
        ("two heaviest instances: TTFT p50", order[-2:]),
        ("two lightest instances: TTFT p50", order[:2]),
    ):
        own = requests.filter(pl.col("instance").is_in(names))
        note = "by prompt tokens, most of which are cached where many turns go"
        ttft_s = float(own["ttft_ms"].quantile(0.5) or 0) / 1e3
        yield THOUSAND.row(what, ttft_s, note)
    tpot = requests.group_by("instance").agg(pl.col("tpot_ms").quantile(0.9))["tpot_ms"]
    yield THOUSAND.row("TPOT p90 of the slowest instance", _number(tpot.max()))
    yield THOUSAND.row("TPOT p90 of the fastest instance", _number(tpot.min()))
    rules = {rule["every_turns"]: rule for rule in document["migration"]["policies"]}
    for every in (None, 10, 5):
        rule = rules[every]
        name = f"migration every {every} turns" if every else "no migration"
        note = "from tokens served so far; the study does not state its rule"
        yield THOUSAND.row(f"{name}: imbalance", rule["max_over_min"], note)
        yield THOUSAND.row(f"{name}: moves", rule["migrations"])
        moved_s = rule["transfer_ms_total"] / 1e3
        yield THOUSAND.row(f"{name}: KV time, s", moved_s, "over 100 Gb/s here")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


SWEEPS = {
    "one H100": REPOSITORY / "studies" / "gpu" / "per_config.json",
    "a CPU host": REPOSITORY / "per_config.json",
}
STEP_COSTS = {
    "Mooncake with the walk": "mooncake_both_hash_sync",
    "no-op": "noop",
    "plain": "plain",
}


def _steps() -> Iterator[Row]:
    for where, path in SWEEPS.items():
        configs = msgspec.json.decode(path.read_bytes())["configs"]

        def row(figure: str, here: float, near: float = 0.0, where: str = where) -> Row:
            return STEPS.row(f"{where}: {figure}", here, near=near, figure=figure)

        for name, config in STEP_COSTS.items():
            found = configs[config]
            # Not reached on the H100.
            if found["schedule_us"] is None:
                continue
            slope = found["slope_us_per_1k_blocks"]["schedule"]["value"]
            yield row(f"{name}: µs per 1,000 blocks", slope, NEAR_US_PER_1K_BLOCKS)
            yield row(f"{name}: schedule p50, µs", found["schedule_us"]["p50"])
        walk = configs["mooncake_both_hash_sync"]
        share = 100 * walk["build_meta_us"]["p50"] / walk["schedule_us"]["p50"]
        yield row("build_meta, % of schedule", share)
        for quantile in ("p50", "p90", "p99"):
            level = walk["get_finished_us"][quantile]
            yield row(f"get_finished {quantile}, µs", level)


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
        yield FRAMEWORK_PART.row(f"{what}, % of plain's step", 100 * us / step_us, note)
    threads = nixl["threads"].keys() - configs["noop"]["threads"].keys()
    us = sum(nixl["threads"][thread]["us_per_step"] or 0 for thread in threads)
    note = "CPU time, beside the step: " + ", ".join(sorted(threads))
    share = 100 * us / step_us
    yield FRAMEWORK_PART.row("its own threads, % of plain's step", share, note)
    for config in ("nixl_both", "mooncake_both"):
        found = [one.get("pss_mib") for one in (configs[config], plain)]
        more = None if None in found else found[0] - found[1]
        what = f"{config}: memory over plain, MiB"
        yield FRAMEWORK_PART.row(what, more, "of the host")


SUBSTRATE = (
    "plain",
    "noop",
    "nixl",
    "mooncake",
    "mooncake_hash_walk",
    "mooncake_fixed",
)
# Levels of plain vLLM, and changes of the others in the unit in brackets.
CHANGES = {
    "TTFT p90": "%",
    "TPOT p90": "%",
    "E2E p90": "%",
    "hotspot": "%",
    "APC": "points",
    "interference": "",
}
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
    for name in SUBSTRATE:
        here = _substrate_levels(arms[name])
        if name != "plain":
            here = [*map(_percent, here[:4], plain[:4]), here[4] - plain[4], here[5]]
        found = [
            SUBSTRATE_PART.row(f"{name}: {what}", figure, near=_near(name, what))
            for what, figure in zip(CHANGES, here, strict=True)
        ]
        lines.append([f"`{name}`", *map(_cell, found), *_of_the_mean(means.get(name))])
        rows += found
    changes = [f"{what}, {unit}" if unit else what for what, unit in CHANGES.items()]
    heads = ["", *changes, "mean E2E, %", "a transfer must save, requests' E2E"]
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


def figure(result: dict[str, Any]) -> str:
    """Return all tables of a result."""
    sections = msgspec.convert(result["rows"], dict[str, list[Row]])
    parts = [
        f"{part}\n\n{rows_table(rows, COLUMNS)}" for part, rows in sections.items()
    ]
    return "\n\n".join(f"### {part}" for part in parts)


if __name__ == "__main__":
    main("reference_study", __doc__, configure, run)
