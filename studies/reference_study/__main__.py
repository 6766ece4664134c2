# SPDX-License-Identifier: Apache-2.0
"""Set every figure of the reference study's results beside this project's own.

Reads the committed sweep and runs of two experiments in virtual time (study_sample and
study_thousand); prints Markdown and writes it with JSON. Of figures that differ
causes.toml has the cause. `python -m studies.reference_study.sample` has the figures of
its trace, `python -m studies.reference_study.forward` those of its device.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.frames import requests_frame

from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from studies.harness import main, publish, rows_table
from studies.reference_study import forward, sample
from studies.reference_study.reference import figures, withdrawn

# Two figures agree if neither is more than a quarter above the other. So do two changes
# that are as near as a change that does not matter (studies/questions), and two
# slopes that are as near as the margin of a verdict.
AGREES_WITHIN = 1.25
NEAR_PERCENT = 5.0
NEAR_US_PER_1K_BLOCKS = 2.0


class Row(msgspec.Struct):
    """A figure of the study and ours. None: not stated, or nothing here has it.

    Figures that are no further apart than `near` agree. `fitted`: ours was chosen so
    that it does. `withdrawn`: by the study's authors, and why.
    """

    what: str
    study: float | None
    here: float | None
    note: str = ""
    near: float = 0.0
    fitted: bool = False
    withdrawn: str = ""

    @property
    def stated(self) -> str:
        """The study's figure."""
        return _text(self.study)

    @property
    def found(self) -> str:
        """The figure here."""
        return _text(self.here)

    @property
    def basis(self) -> str:
        """Origin of the figure here."""
        if self.here is None:
            return "-"
        return "input" if self.fitted else "prediction"

    @property
    def verdict(self) -> str:
        """The verdict on the two figures."""
        if self.withdrawn:
            return "theirs withdrawn"
        if self.study is None or self.here is None:
            return "not comparable"
        same = agrees(self.study, self.here, self.near)
        return "agrees" if same else "differs"


COLUMNS = {
    "": "{row.what}",
    "study": "{row.stated}",
    "here": "{row.found}",
    "here is": "{row.basis}",
    "verdict": "{row.verdict}",
    "cause": "{row.note}",
}


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words about the figures of a section whose names match a regular expression."""

    section: str
    figures: str
    note: str = ""
    fitted: bool = False


CAUSES = msgspec.toml.decode(
    Path(__file__).with_name("causes.toml").read_bytes(), type=dict[str, list[Cause]]
)["cause"]


class Section:
    """A section of the study, with its figures of reference.csv by name."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._figures = figures(title)
        self._withdrawn = withdrawn(title)
        self._causes = [cause for cause in CAUSES if cause.section == title]

    def row(
        self, what: str, here: float | None, near: float = 0.0, figure: str = ""
    ) -> Row:
        """Set `here` beside the study's figure `figure`, or `what`."""
        figure = figure or what
        gone = self._withdrawn.get(figure, "")
        row = Row(what, self._figures.get(figure), here, gone, near, withdrawn=gone)
        for cause in self._causes:
            if re.fullmatch(cause.figures, what):
                row.fitted |= cause.fitted
                row.note = row.note or cause.note
        if row.verdict == "agrees" and not row.fitted:
            row.note = ""
        return row

    def change(self, what: str, here: float | None) -> Row:
        """Set a change in % or points beside the study's."""
        return self.row(what, here, NEAR_PERCENT)

    def stated_alone(self) -> Iterator[Row]:
        """Yield the figures that nothing here is set beside."""
        for figure in self._figures:
            yield self.row(figure, None)


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
    for name in ("sample", "thousand"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/reference_study.md"))


def run(arguments: argparse.Namespace) -> int:
    """Print and write the page. Returns the exit code. Raises RecordsError."""
    replay = _analysis(arguments.sample, "study_sample", SAMPLE)["arms"]
    sections: dict[str, list[Row]] = {
        REPLAY.title: [*_replay(replay)],
        BY_CLASS.title: [*_classes(replay, requests_of(arguments.sample))],
        OFFLOADING.title: [*_elastic(replay)],
        CACHE.title: [*_cache(replay)],
        THOUSAND.title: [*_thousand(arguments.thousand)],
        STEPS.title: [*_steps()],
        FRAMEWORK_PART.title: [*_framework()],
        SUBSTRATE_PART.title: [*SUBSTRATE_PART.stated_alone()],
    }
    parts = [
        f"Agrees: within a factor of {AGREES_WITHIN:g}, {NEAR_PERCENT:g} points of a "
        f"change in %, or {NEAR_US_PER_1K_BLOCKS:g} µs of a slope. Times in s, "
        "TPOT in ms."
    ]
    for title, rows in sections.items():
        parts += [f"## {title}", rows_table(rows, COLUMNS)]
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
SAMPLE = (
    "linear@1",
    "linear@2",
    "lmetric@1",
    "lmetric_plus_one@1",
    "elastic@1",
    "round_robin@1",
)


def _replay(arms: dict[str, Any]) -> Iterator[Row]:
    for policy in ("linear", "lmetric", "elastic"):
        arm = arms[f"{policy}@1"]
        ok = arm["outcomes"]
        yield REPLAY.row(
            f"{policy}: failed, %",
            100 * (ok["n"] - ok["ok"]) / ok["n"],
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


def requests_of(run: Path) -> pl.DataFrame:
    """Read a run's requests that ended ok."""
    return requests_frame(read_run(run)).filter(pl.col("status") == "ok")


def _classes(arms: dict[str, Any], requests: pl.DataFrame) -> Iterator[Row]:
    yield from _class_rows(arms["linear@1"], "linear", CLASSES)
    yield from _class_rows(arms["elastic@1"], "elastic", CLASSES[:2])
    # HEAVY and HUGE together.
    own = requests.filter(pl.col("arm") == "elastic@1")
    heavy = own.filter(pl.col("class").is_in(CLASSES[2:]))
    label = "elastic, HEAVY above 20k"
    yield BY_CLASS.row(f"{label}: % of requests", 100 * len(heavy) / max(1, len(own)))
    for level, metric, quantile in LEVELS[:3]:
        found = _number(heavy[metric].quantile(float(quantile[1:]) / 100))
        scale = 1 if metric == "tpot_ms" else 1e3
        yield BY_CLASS.row(
            f"{label}: {level}", None if found is None else found / scale
        )


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

    for arm, name in (("lmetric@1", "LMetric"), ("lmetric_plus_one@1", "LMetric + 1")):
        for place, found in enumerate(apc(arm), 1):
            figure = f"LMetric: APC of instance {place}, %"
            what = f"{name}: APC of instance {place}, %"
            yield CACHE.row(what, found, figure=figure)
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
        yield CACHE.change(f"linear's TTFT {quantile}, %", _percent(new, old))


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
        ttft_s = float(own["ttft_ms"].quantile(0.5) or 0) / 1e3
        yield THOUSAND.row(what, ttft_s)
    tpot = requests.group_by("instance").agg(pl.col("tpot_ms").quantile(0.9))["tpot_ms"]
    yield THOUSAND.row("TPOT p90 of the slowest instance", _number(tpot.max()))
    yield THOUSAND.row("TPOT p90 of the fastest instance", _number(tpot.min()))
    rules = {rule["every_turns"]: rule for rule in document["migration"]["policies"]}
    for every in (None, 10, 5):
        rule = rules[every]
        name = f"migration every {every} turns" if every else "no migration"
        yield THOUSAND.row(f"{name}: imbalance", rule["max_over_min"])
        yield THOUSAND.row(f"{name}: moves", rule["migrations"])
        moved_s = rule["transfer_ms_total"] / 1e3
        yield THOUSAND.row(f"{name}: KV time, s", moved_s)


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
            return STEPS.row(f"{where}: {figure}", here, near, figure)

        for name, config in STEP_COSTS.items():
            found = configs[config]
            # Not reached on the H100.
            if found["schedule_us"] is None:
                continue
            slope = f"{name}: µs per 1,000 blocks"
            held = found["slope_us_per_1k_blocks"]["schedule"]["value"]
            yield STEPS.row(f"{where}: {slope}, held", held)
            if growth := found["growth_slope_us_per_1k_blocks"]:
                yield row(slope, growth["value"], NEAR_US_PER_1K_BLOCKS)
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
    """Yield NIXL's calls by purpose, in % of plain's step."""
    path = SWEEPS["a CPU host"]
    configs = msgspec.json.decode(path.read_bytes())["configs"]
    plain, nixl = configs["plain"], configs["nixl_both"]
    step_us = plain["attribution_us"]["step"]
    for what, methods in FRAMEWORK.items():
        us = sum(nixl["methods"][method]["us_per_step"] for method in methods)
        yield FRAMEWORK_PART.row(f"{what}, % of plain's step", 100 * us / step_us)
    threads = nixl["threads"].keys() - configs["noop"]["threads"].keys()
    us = sum(nixl["threads"][thread]["us_per_step"] or 0 for thread in threads)
    share = 100 * us / step_us
    yield FRAMEWORK_PART.row("its own threads, % of plain's step", share)


def figure(result: dict[str, Any]) -> str:
    """Return all tables: a result's, the populations and the forward."""
    sections = msgspec.convert(result["rows"], dict[str, list[Row]])
    notes = dict.fromkeys(row.note for rows in sections.values() for row in rows)
    causes = {note: str(number) for number, note in enumerate(filter(None, notes), 1)}
    parts = {
        part: rows_table(
            [
                msgspec.structs.replace(row, note=causes.get(row.note, ""))
                for row in rows
            ],
            COLUMNS,
        )
        for part, rows in sections.items()
    }
    listed = [f"{number}. {note}" for note, number in causes.items()]
    parts["Causes, and what else is not alike"] = "\n".join(listed)
    parts["Which population each figure is of"] = sample.population_table()
    parts["The forward"] = forward.forward_table(forward.rows())
    return "\n\n".join(f"### {part}\n\n{text}" for part, text in parts.items())


if __name__ == "__main__":
    main("reference_study", __doc__, configure, run)
