# SPDX-License-Identifier: Apache-2.0
"""Compare arms of runs in virtual time by the rule that was written before they ran.

The rule, the experiments and what was expected of them are in README.md. Puts the
answers of the runs into the committed result, where those of other experiments stay,
and makes the page's tables again.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.comparison import paired
from kvtax_fleet.analyze.frames import requests_frame

from kvtax.engine import provenance
from kvtax.records import RecordsError
from kvtax.records.estimate import Estimate
from kvtax.records.files import write_whole
from kvtax.report.markdown import DASH
from studies.__main__ import pages
from studies.harness import main, rows_table

# Beside each arm with its baseline: pairs that the expectations compare.
ALSO = (
    ("elastic_layers", "elastic_64"),
    ("lmetric_exact", "lmetric"),
    ("dynamo_agentic", "dynamo"),
)
METRICS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
HEAVY = ("HEAVY", "HUGE")
RESULT = Path(__file__).with_name("result.json.gz")


class Row(msgspec.Struct, frozen=True):
    """An arm against another at one load; differences of means, in %."""

    load: int
    arm: str
    against: str
    n: int
    ttft: Estimate
    tpot: Estimate
    e2e: Estimate
    moved_percent: float | None
    """Heavy prompts that the arm prefilled elsewhere; null if it moves none."""

    @property
    def moved(self) -> str:
        """Format the share of heavy prompts that moved."""
        return DASH if self.moved_percent is None else f"{self.moved_percent:.0f}"


class Answer(msgspec.Struct, frozen=True):
    """An experiment's comparisons, its orders, and the commit that ran it."""

    commit: str | None
    orders: int
    rows: list[Row]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs to read."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")


def run(arguments: argparse.Namespace) -> int:
    """Write the committed result and its page. Returns the exit code.

    Raises RecordsError.
    """
    result = read_result()
    for folder in arguments.runs:
        arms = read_run(folder)
        requests = requests_frame(arms)
        answer = Answer(
            arms[0].info.versions.get("git_commit"),
            requests["repeat"].n_unique(),
            compared(requests),
        )
        result[str(arms[0].info.experiment)] = msgspec.to_builtins(answer)
    result["provenance"] = provenance.collect({}, "python -m studies.questions RUN")
    write_whole(RESULT, gzip.compress(msgspec.json.encode(result), mtime=0))
    page = RESULT.with_name("README.md")
    write_whole(page, pages()[page].encode())
    print(f"wrote {RESULT} and {page}")
    return 0


def read_result(file: Path = RESULT) -> dict[str, Any]:
    """Read the committed result. Raises RecordsError."""
    try:
        content = gzip.decompress(file.read_bytes())
        document: dict[str, Any] = msgspec.json.decode(content)
        answers_of(document)
    except (OSError, EOFError, msgspec.MsgspecError, AttributeError) as error:
        raise RecordsError(
            f"{file}: no result of `python -m studies.questions`: {error}"
        ) from None
    return document


def answers_of(result: dict[str, Any]) -> dict[str, Answer]:
    """Return the answers of a result, by experiment."""
    return {
        name: msgspec.convert(document, Answer)
        for name, document in result.items()
        if name != "provenance"
    }


def compared(requests: pl.DataFrame) -> list[Row]:
    """Compare each arm with its run's first, and the pairs of ALSO."""
    arms = requests["arm"].unique(maintain_order=True).to_list()
    loads: dict[int, list[str]] = {}
    for arm in arms:
        name, _, load = arm.partition("@")
        loads.setdefault(int(load), []).append(name)
    rows = []
    for load, (baseline, *others) in sorted(loads.items()):
        pairs = [(arm, baseline) for arm in others]
        pairs += [pair for pair in ALSO if set(pair) <= set(others)]
        rows += [_row(requests, load, *pair) for pair in pairs]
    return [row for row in rows if row is not None]


def _row(requests: pl.DataFrame, load: int, arm: str, against: str) -> Row | None:
    metrics = paired(requests, f"{arm}@{load}", f"{against}@{load}")
    percent = {
        name: known.percent
        for name, metric in METRICS.items()
        if (known := metrics[metric]) is not None
    }
    e2e = metrics["e2e_ms"]
    if e2e is None or len(percent) < len(METRICS):
        return None
    moved_percent = _moved_percent(requests.filter(pl.col("arm") == f"{arm}@{load}"))
    return Row(load, arm, against, e2e.n, **percent, moved_percent=moved_percent)


def _moved_percent(requests: pl.DataFrame) -> float | None:
    """Return the share of an arm's heavy prompts that were prefilled elsewhere."""
    heavy = requests.filter(pl.col("decided_class").is_in(HEAVY))
    moved = int(heavy["prefill_instance"].is_not_null().sum())
    return round(100 * moved / heavy.height, 1) if moved else None


COLUMNS = {
    "arm": "`{row.arm}`",
    "against": "`{row.against}`",
    "load": "{row.load}",
    "TTFT, %": "{row.ttft:+.1f}",
    "TPOT, %": "{row.tpot:+.1f}",
    "E2E, %": "{row.e2e:+.1f}",
}
MOVED = {"heavy prompts moved, %": "{row.moved}"}


def _section(name: str, answer: Answer) -> str:
    """Return an experiment's table below its name."""
    moves = any(row.moved_percent is not None for row in answer.rows)
    table = rows_table(answer.rows, COLUMNS | MOVED if moves else COLUMNS)
    made = f"{answer.orders} orders, at {str(answer.commit)[:7]}."
    return f"### {name}\n\n{made}\n\n{table}"


def figure(result: dict[str, Any]) -> str:
    """Return the differences of means, a table for each experiment."""
    sections = (_section(*pair) for pair in sorted(answers_of(result).items()))
    return "\n\n".join(sections)


if __name__ == "__main__":
    main("questions", __doc__, configure, run)
