# SPDX-License-Identifier: Apache-2.0
"""The figure of one patch of the series: its code before and after, in one process.

    python -m tools.upstream.evidence PATCH [--vllm VERSION | --vllm PATH]

Both versions of the changed module are loaded into one engine process of that vLLM and
called in turns, in an order drawn anew. Times are medians with 95 % intervals, from
resampling rounds. `kv_transfer_abort_race` runs scenarios of aborts instead, on that
vLLM as it is and with the patch. Prints a table in Markdown and writes the result to
tools/upstream/results/PATCH.json, whose table patches/upstream/README.md shows.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtax.engine.engine_process import EngineProcess
from kvtax.engine.installation import Installation
from kvtax.engine.releases import on_sources, release, tested_releases
from kvtax.engine.server import tail
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.report.markdown import table
from tools.upstream import aborts

RESULTS = Path(__file__).with_name("results")
PAGE = REPOSITORY / "patches" / "upstream" / "README.md"
WORKER = "tools.upstream.evidence_worker"
VLLM = "0.33.0"
# What engines of all releases need on a CPU.
ON_A_CPU = ("mooncake_cpu_layout", "cpu_uniproc", "cpu_small_blocks")
# The null model's own length is less than the longest context here.
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
ROUNDS, DRAWS = 10, 2_000


class Row(msgspec.Struct):
    """A case before and after the patch, in the unit of its table."""

    case: str
    before: Estimate
    after: Estimate
    n: int


class Scenario(msgspec.Struct):
    """A scenario of aborts: what went wrong before and after the patch, in words."""

    case: str
    before: list[str]
    after: list[str]


class Result(msgspec.Struct):
    """Rows of one patch, and how they were made."""

    patch: str
    command: str
    commit: str
    vllm: str
    made: str
    unit: str
    rows: list[Row]
    scenarios: list[Scenario]


class Figure(NamedTuple):
    """Cases of a patch by name, each a call of the worker, and their unit."""

    function: str
    cases: dict[str, tuple[Any, ...]]
    unit: str


CONTEXTS = (1_024, 16_384, 131_072)
FIGURES = {
    "mooncake_store_pending_loads": Figure(
        "time_metadata",
        {f"{n} running requests": (n, 64) for n in (1, 32, 128, 256)},
        "µs of `build_connector_meta` in a decode-only step",
    ),
    "offloading_new_hashes_only": Figure(
        "time_metadata",
        {f"8 requests of {n:,} tokens": (8, n) for n in CONTEXTS},
        "µs of `build_connector_meta` in a decode-only step",
    ),
    "block_pool_bounded_hashes": Figure(
        "time_first_chunk",
        {f"prompt of {n:,} tokens": (n,) for n in CONTEXTS},
        "µs of `cache_full_blocks` for the first 2,048 tokens",
    ),
    "mooncake_get_finished_short_circuit": Figure(
        "time_get_finished",
        {
            "idle, p50": (0, 0.5),
            "idle, p99": (0, 0.99),
            "beside a busy Python thread, p50": (1, 0.5),
            "beside a busy Python thread, p99": (1, 0.99),
        },
        "µs of `get_finished` with nothing to report",
    ),
    "block_pool_delta_listener": Figure(
        "time_pool",
        {
            f"a block {change}, {who}": (change, who)
            for change in ("cached", "evicted")
            for who in ("nobody listens", "one tracker")
        },
        "ns",
    ),
    "mooncake_sorted_block_groups": Figure(
        "count_groups",
        {
            "one at a time, 250 blocks": (1, 1, False),
            "one at a time, sizes vary": (1, 1, True),
            "4 prefills, 8 decodes, sizes vary": (4, 8, True),
            "8 prefills, 32 decodes, sizes vary": (8, 32, True),
        },
        "groups per 100 blocks, two pools of 12,000, 20 seeds",
    ),
}


@contextmanager
def vllm_of(name: str) -> Iterator[Installation]:
    """Yield the vLLM of a path, of third_party/, or of an installed release."""
    sources = Path(name)
    if not (sources / "vllm").is_dir():
        sources = REPOSITORY / "third_party" / f"vllm-{name}"
    if name in tested_releases() or not (sources / "vllm").is_dir():
        yield release(name)
        return
    with tempfile.TemporaryDirectory(prefix="kvtax-evidence-") as folder:
        yield on_sources(sources, release(tested_releases()[-1]), Path(folder, "tree"))


def measure(patch: str, figure: Figure, installed: Installation) -> list[Row]:
    """Call both versions in all cases. Raises ServerError."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtax-evidence-") as folder,
        EngineProcess(
            Path(folder, "engine"),
            WORKER,
            [patch, *(p for p in ON_A_CPU if p != patch)],
            patch,
            env=ENV,
            installed=installed,
        ) as process,
    ):
        process.wait_ready()
        rows = []
        for case, arguments in figure.cases.items():
            try:
                rounds = [
                    process.ask(figure.function, number, *arguments)
                    for number in range(ROUNDS)
                ]
            except Exception:
                print(tail(Path(folder, "engine", "log")), file=sys.stderr)
                raise
            rows.append(_row(case, np.array(rounds)))
            print(f"{case}: {rows[-1].before:.1f}, {rows[-1].after:.1f}", flush=True)
        return rows


def _row(case: str, rounds: Any) -> Row:
    """Summarize (rounds, 2, n) values by medians of the rounds' medians."""
    medians = np.median(rounds, axis=2)
    order = np.random.default_rng(0)
    drawn = medians[order.integers(len(medians), size=(DRAWS, len(medians)))]
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975), axis=0)
    before, after = (
        Estimate(float(v), (float(a), float(b)))
        for v, a, b in zip(np.median(medians, axis=0), low, high, strict=True)
    )
    return Row(case, before, after, rounds.shape[0] * rounds.shape[2])


def run_aborts(installed: Installation) -> list[Scenario]:
    """Run the scenarios of aborts without the patch and with it."""
    before, after = (
        aborts.run_scenarios(installed, [*ON_A_CPU, *patches])
        for patches in ([], [aborts.PATCH])
    )
    return [Scenario(name, before[name], after[name]) for name in before]


def result_table(result: Result) -> str:
    """Return the table of a result; of scenarios, those that fail before or after."""
    if result.scenarios:
        body = [
            [
                scenario.case.replace("_", " "),
                *map(_outcome, (scenario.before, scenario.after)),
            ]
            for scenario in result.scenarios
            if scenario.before or scenario.after
        ]
        passed = [
            f"{sum(not problems for problems in side)} of {len(result.scenarios)} pass"
            for side in zip(
                *((s.before, s.after) for s in result.scenarios), strict=True
            )
        ]
        return table([result.unit, "before", "after"], [["all", *passed], *body])
    body = [
        [row.case, f"{row.before:,.1f}", f"{row.after:,.1f}", f"{row.n:,}"]
        for row in result.rows
    ]
    return table([result.unit, "before", "after", "n"], body)


def _outcome(problems: list[str]) -> str:
    return "fails" if problems else "passes"


def page_with_results(page: str) -> str:
    """Put the table of each committed result between its marks in a page."""
    for file in sorted(RESULTS.glob("*.json")):
        result = msgspec.json.decode(file.read_bytes(), type=Result)
        begin, end = f"<!--evidence {result.patch}-->", "<!--/evidence-->"
        if begin not in page:
            continue
        start = page.index(begin) + len(begin)
        stop = page.index(end, start)
        note = f"`{result.command}`, vLLM {result.vllm}, {result.made}"
        text = f"\n{result_table(result)}\n\n{note}\n"
        page = page[:start] + text + page[stop:]
    return page


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    """Measure the patch of the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patch", choices=[*FIGURES, aborts.PATCH])
    parser.add_argument("--vllm", default=VLLM, help=f"default {VLLM}")
    arguments = parser.parse_args()
    rows: list[Row] = []
    scenarios: list[Scenario] = []
    with vllm_of(arguments.vllm) as installed:
        if figure := FIGURES.get(arguments.patch):
            rows = measure(arguments.patch, figure, installed)
        else:
            scenarios = run_aborts(installed)
    result = Result(
        arguments.patch,
        f"python -m tools.upstream.evidence {arguments.patch}",
        _commit(),
        arguments.vllm,
        datetime.date.today().isoformat(),
        figure.unit if figure else "scenario",
        rows,
        scenarios,
    )
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{arguments.patch}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    PAGE.write_text(page_with_results(PAGE.read_text()))
    print(result_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
