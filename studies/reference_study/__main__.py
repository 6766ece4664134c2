# SPDX-License-Identifier: Apache-2.0
"""Set every figure of the reference study's results beside this project's own.

Without options this makes README.md and the CSV files beside it again, from the
committed result, today's sweeps and causes.toml, and notes their inputs. With --sample
and --thousand, runs of study_sample and study_thousand in virtual time, it makes the
committed result again first. `python -m studies.reference_study.sample` has the figures
of the study's trace, `python -m studies.reference_study.forward` those of its device.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.frames import requests_frame

from kvtax.engine import provenance
from kvtax.paths import REPOSITORY
from kvtax.records import RecordsError
from kvtax.records.estimate import Estimate
from kvtax.records.files import write_whole
from kvtax.report.markdown import table
from studies.__main__ import pages
from studies.harness import STUDIES, committed, main, rows_table
from studies.reference_study import forward, sample
from studies.reference_study.reference import figures, withdrawn
from tools import inputs

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
    ci95: tuple[float, float] | None = None

    @property
    def stated(self) -> str:
        """The study's figure."""
        return _text(self.study)

    @property
    def ours(self) -> str:
        """The figure here, with its interval where it has one."""
        if self.ci95 is None:
            return _text(self.here)
        return f"{_text(self.here)} [{', '.join(map(_text, self.ci95))}]"

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


# Of a row that differs; `here` is fitted where it is marked.
COLUMNS = {
    "figure": "{row.what}",
    "study": "{row.stated}",
    "here": "{row.ours}",
    "cause": "{row.note}",
}
FIGURES = "figures.csv"
NO_FIGURE = "nothing here has this figure"
# All that the page and its CSV files are made of, besides their code.
INPUTS = (
    "per_config.json",
    "studies/gpu/per_config.json",
    "studies/reference_study/result.json.gz",
    "studies/reference_study/reference.csv",
    "studies/reference_study/causes.toml",
)
HERE = Path(__file__).parent
COMMAND = "python -m studies.reference_study --sample RUN --thousand RUN"
# Metrics of a sweep's holds that the attribution shows.
PARTS = {
    "timed": "calls of the connector",
    "schedule": "all of `schedule()`",
    "prefill": "steps with a prefill",
    "threads": "threads beside the step",
    "step": "the whole step",
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
        elif here is None:
            row.note = row.note or NO_FIGURE
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
    """Add the runs to read."""
    for name in ("sample", "thousand"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and its files. Returns the exit code. Raises RecordsError."""
    if (arguments.sample is None) != (arguments.thousand is None):
        raise RecordsError("give both of --sample and --thousand, or neither")
    if arguments.sample is not None:
        simulated = simulated_rows(arguments.sample, arguments.thousand)
        result = {"provenance": provenance.collect({}, COMMAND), "rows": simulated}
        content = gzip.compress(msgspec.json.encode(result), mtime=0)
        write_whole(HERE / "result.json.gz", content)
    for name, text in tables().items():
        write_whole(HERE / name, text.encode())
    page = HERE / "README.md"
    write_whole(page, pages()[page].encode())
    for made in (page.name, FIGURES):
        name = f"studies/reference_study/{made}"
        inputs.note(name, [*INPUTS])
    print(f"wrote {page}, {', '.join(tables())} and {inputs.LOCK}")
    return 0


def simulated_rows(replay: Path, thousand: Path) -> dict[str, list[Row]]:
    """Set the figures of R beside those of its two simulated runs, by section."""
    arms = _analysis(replay, "study_sample", SAMPLE)["arms"]
    return {
        REPLAY.title: [*_replay(arms)],
        BY_CLASS.title: [*_classes(arms, requests_of(replay))],
        OFFLOADING.title: [*_elastic(arms)],
        CACHE.title: [*_cache(arms)],
        THOUSAND.title: [*_thousand(thousand)],
    }


def sections_now() -> dict[str, list[Row]]:
    """Return the committed simulated rows, and those of today's sweeps."""
    simulated: dict[str, list[Row]] = committed(
        "reference_study", "rows", dict[str, list[Row]]
    )
    return simulated | {
        STEPS.title: [*_steps()],
        FRAMEWORK_PART.title: [*_framework()],
        SUBSTRATE_PART.title: [*SUBSTRATE_PART.stated_alone()],
    }


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
        level_here = _number(heavy[metric].quantile(float(quantile[1:]) / 100))
        scale = 1 if metric == "tpot_ms" else 1e3
        yield BY_CLASS.row(
            f"{label}: {level}", None if level_here is None else level_here / scale
        )


def _class_rows(arm: Any, name: str, classes: Iterable[str]) -> Iterator[Row]:
    of_all = arm["latency"]["all"]
    for kind in classes:
        n = of_all.get(kind, {}).get("n", 0)
        label = f"{name}, {kind}"
        share = 100 * n / of_all["all"]["n"]
        yield BY_CLASS.row(f"{label}: % of requests", share)
        for level, metric, quantile in LEVELS[:3]:
            level_here = _level(arm, metric, quantile, kind)
            yield BY_CLASS.row(f"{label}: {level}", level_here)


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
        level_here = phases[phase]["value"] / 1e3 if phases[phase] else None
        yield OFFLOADING.row(name, level_here)
    share = 100 * offloads["begun"] / offloads["requests"]
    yield OFFLOADING.row("requests offloaded, %", share)


def _cache(arms: dict[str, Any]) -> Iterator[Row]:
    def apc(arm: str) -> list[float]:
        counted = arms[arm]["repeats"][0]["apc"]["instances"].values()
        return sorted((100 * each["apc"] for each in counted), reverse=True)

    for arm, name in (("lmetric@1", "LMetric"), ("lmetric_plus_one@1", "LMetric + 1")):
        for place, level_here in enumerate(apc(arm), 1):
            figure = f"LMetric: APC of instance {place}, %"
            what = f"{name}: APC of instance {place}, %"
            yield CACHE.row(what, level_here, figure=figure)
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
    runs = [each for each in read_run(run) if each.info.arm == "linear@1"]
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
    "one H100": STUDIES / "gpu" / "per_config.json",
    "a CPU host": REPOSITORY / "per_config.json",
}
STEP_COSTS = {
    "Mooncake with the walk": "mooncake_both_hash_sync",
    "no-op": "noop",
    "plain": "plain",
}


class Config:
    """A config of a sweep's per_config.json; what it does not have is None."""

    def __init__(self, sweep: Path, name: str) -> None:
        configs = msgspec.json.decode(sweep.read_bytes())["configs"]
        self._entry: Any = configs.get(name)

    def at(self, *path: str) -> Any:
        """Return the entry at a path of names."""
        entry = self._entry
        for name in path:
            entry = entry.get(name) if isinstance(entry, dict) else None
        return entry

    def number(self, *path: str) -> float | None:
        """Return the number at a path of names."""
        return _number(self.at(*path))

    def us_per_step(self, kind: str, names: Iterable[str]) -> float | None:
        """Sum what methods or threads take in a step; None where one is missing."""
        taken = [self.number(kind, name, "us_per_step") for name in names]
        known = [us for us in taken if us is not None]
        return sum(known) if len(known) == len(taken) else None


def _steps() -> Iterator[Row]:
    for where, path in SWEEPS.items():
        for name, config in STEP_COSTS.items():
            own = Config(path, config)
            slope = f"{name}: µs per 1,000 blocks"
            held, grown = "slope_us_per_1k_blocks", "growth_slope_us_per_1k_blocks"
            beside_nothing = f"{where}: {slope}, held"
            level = own.at(held, "timed") or own.at(held, "schedule")
            yield _with_interval(STEPS.row(beside_nothing, None), level)
            near = NEAR_US_PER_1K_BLOCKS
            row = STEPS.row(f"{where}: {slope}", None, near, slope)
            yield _with_interval(row, own.at(grown), STEPS, slope)
            figure = f"{name}: schedule p50, µs"
            yield _beside(where, figure, own.number("schedule_us", "p50"))
        walk = Config(path, STEP_COSTS["Mooncake with the walk"])
        meta, of = (
            walk.number(f"{name}_us", "p50") for name in ("build_meta", "schedule")
        )
        yield _beside(
            where, "build_meta, % of schedule", 100 * meta / of if meta and of else None
        )
        for at in ("p50", "p90", "p99"):
            level = walk.number("get_finished_us", at)
            yield _beside(where, f"get_finished {at}, µs", level)


def _beside(where: str, figure: str, here: float | None) -> Row:
    return STEPS.row(f"{where}: {figure}", here, figure=figure)


def _with_interval(
    row: Row, level: Any, section: Section | None = None, figure: str = ""
) -> Row:
    """Put a level and its interval into a row; its cause depends on both figures."""
    if not isinstance(level, dict) or level.get("value") is None:
        return row
    if section is not None:
        row = section.row(row.what, level["value"], row.near, figure)
    ends = level.get("ci95")
    return msgspec.structs.replace(
        row, here=level["value"], ci95=tuple(ends) if ends else None
    )


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
    plain, nixl, noop = (Config(path, name) for name in ("plain", "nixl_both", "noop"))
    step_us = plain.number("attribution_us", "step")

    def row(what: str, us: float | None) -> Row:
        share = 100 * us / step_us if us is not None and step_us else None
        return FRAMEWORK_PART.row(f"{what}, % of plain's step", share)

    for what, methods in FRAMEWORK.items():
        yield row(what, nixl.us_per_step("methods", methods))
    own = (nixl.at("threads") or {}).keys() - (noop.at("threads") or {}).keys()
    yield row("its own threads", nixl.us_per_step("threads", sorted(own)))


HEADS = [
    "section",
    "figure",
    "study",
    "here",
    "low",
    "high",
    "here is",
    "verdict",
    "cause",
]


def tables() -> dict[str, str]:
    """Return the CSV files beside the page: all figures, populations, the forward."""
    lines = [
        [title, row.what, row.stated, _text(row.here), *_ends(row), row.basis]
        for title, rows in sections_now().items()
        for row in rows
    ]
    judged = [
        [row.verdict, row.note] for rows in sections_now().values() for row in rows
    ]
    return {
        FIGURES: csv_text(HEADS, map(add, lines, judged)),
        "populations.csv": csv_text(*sample.population_table()),
        "forward.csv": csv_text(*forward.forward_table(forward.rows())),
    }


def _ends(row: Row) -> list[str]:
    return ["", ""] if row.ci95 is None else [_text(end) for end in row.ci95]


def csv_text(heads: list[str], lines: Iterable[list[str]]) -> str:
    """Format lines as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()


def _attribution() -> str:
    """Make the table of what a full cache adds to the walk's step, with intervals."""
    walk = Config(SWEEPS["a CPU host"], STEP_COSTS["Mooncake with the walk"])
    rows = [
        [words, f"{msgspec.convert(added, Estimate):+.1f}"]
        for part, words in PARTS.items()
        if (added := walk.at("held", part, "full_adds"))
    ]
    heads = ["Mooncake with the walk", "a full cache adds, % of vLLM's own work"]
    return table(heads, rows)


def figure(result: dict[str, Any]) -> str:
    """Return the rows that differ, with their causes; the others are counted."""
    sections = sections_now()
    rows = [row for of in sections.values() for row in of]
    differing = {
        title: [row for row in of if row.verdict == "differs"]
        for title, of in sections.items()
    }
    notes = dict.fromkeys(row.note for of in differing.values() for row in of)
    causes = {note: str(number) for number, note in enumerate(filter(None, notes), 1)}
    counts = Counter((row.verdict, row.basis) for row in rows)
    parts = [
        f"Of {len(rows)} figures {counts['differs', 'prediction']} predictions and "
        f"{counts['differs', 'input']} inputs differ, "
        f"{counts['agrees', 'prediction']} predictions and "
        f"{counts['agrees', 'input']} inputs agree, and "
        f"{sum(row.verdict == 'theirs withdrawn' for row in rows)} are withdrawn by "
        "their authors. The rest has no figure on one of the sides."
    ]
    for title, of in differing.items():
        if of:
            shown = [
                msgspec.structs.replace(
                    row,
                    what=f"{row.what} (fitted)" if row.fitted else row.what,
                    note=causes.get(row.note, ""),
                )
                for row in of
            ]
            parts.append(f"**{title}**\n\n{rows_table(shown, COLUMNS)}")
    parts.append(_attribution())
    parts.append("\n".join(f"{number}. {note}" for note, number in causes.items()))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main("reference_study", __doc__, configure, run)
