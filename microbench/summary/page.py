# SPDX-License-Identifier: Apache-2.0
"""report.html of a run: the answer first, then its evidence."""

from __future__ import annotations

from pathlib import Path

from kvtax.look.discover import common_clock, discover
from kvtax.look.instances import read_instance
from kvtax.look.page import time_line
from kvtax.records import stacks
from kvtax.report import render
from kvtax.report.document import Flame, Page, Section, TimeLine
from kvtax.verdict.analysis import Analysis
from kvtax.verdict.trials import LoadedTrial
from microbench.summary import study
from microbench.summary.additions import (
    attribution,
    noise_floor,
    parts_table,
    reconciliation,
)
from microbench.summary.context import (
    accounts,
    hosts,
    model_note,
    provenance,
    warnings_of,
)
from microbench.summary.figures import CURVES, curve_figure
from microbench.summary.fixes import before_and_after
from microbench.summary.growth import (
    answer,
    expected_verdicts,
    hypothesis,
    level_table,
    verdicts,
)

QUESTION = (
    "What does a KV connector cost per engine step, and does that grow with |cache|, "
    "the number of cached block hashes?"
)
# Figure beside the answer: the time that users wait for.
FIRST = "before_after"


def write_page(analysis: Analysis, servers: list[Section]) -> str:
    """Render the page; `servers` are the sections on single servers."""
    document, roles = analysis.document, analysis.roles
    figures = {name: curve_figure(analysis, name) for name in CURVES}
    first, *others = [figures.pop(FIRST), *figures.values()]
    sections = [
        study.table_of(document, roles),
        verdicts(document),
        first,
        expected_verdicts(document, roles),
        *before_and_after(document, roles),
        *(hypothesis(document, roles, name) for name in roles.named("hypothesis")),
        *others,
        level_table(document),
        parts_table(document),
        attribution(document),
        reconciliation(document, roles.baseline),
        noise_floor(document),
        hosts(document, roles),
        accounts(document),
        *servers,
        provenance(document),
    ]
    return render.html(
        Page(
            title="What a KV connector costs per engine step",
            question=QUESTION,
            answer=[answer(document), model_note(document)],
            warnings=warnings_of(analysis.warnings, document.configs),
            sections=[section for section in sections if section is not None],
            made="Another repeat's moments, or a trace of them: kvtax look "
            "RUN_DIR/CONFIG/r1. Every figure: per_config.json.",
        )
    )


# Few enough that a page of twelve configs stays well below 3 MB.
INTERVALS = 300
REQUESTS = 200


def moments(run_dir: Path, trials: list[LoadedTrial]) -> list[TimeLine]:
    """Build a folded time line per measured config, of its first good repeat.

    Raises RecordsError for files that `load_run` would not have read either.
    """
    first: dict[str, int] = {}
    for trial in trials:
        if trial.error is None and trial.engine_steps:
            first.setdefault(trial.config, trial.repeat)
    return [
        _moments(f"{config} r{repeat}", run_dir / config / f"r{repeat}")
        for config, repeat in first.items()
    ]


def code(run_dir: Path, trials: list[LoadedTrial]) -> list[Flame]:
    """Build a folded flame graph per process of each sampled config.

    Raises RecordsError if its records cannot be read.
    """
    shown = []
    for config in dict.fromkeys(trial.config for trial in trials):
        folder = run_dir / config / stacks.FOLDER
        if any(folder.rglob("stacks.*.json")):
            (found, *_), _ = discover(folder)
            for flame in read_instance(found).flames:
                flame.title, flame.open = f"{config}: {flame.title}", False
                shown.append(flame)
    return shown


def _moments(name: str, folder: Path) -> TimeLine:
    (found, *_), _ = discover(folder)
    line = time_line(
        found.name, read_instance(found), common_clock([found]), INTERVALS, REQUESTS
    )
    line.title, line.open = f"Every moment of {name}", False
    return line
