# SPDX-License-Identifier: Apache-2.0
"""Write committed figures into the pages that quote them.

    python -m tools.figures      rewrites every marked figure

A mark is a pair of comments around a figure:

    <!--sweep plain.schedule_us.p50 ,.0f-->287<!--/-->

It names a value of per_config.json by keys with dots between them, a config first, and
the value's format as Python writes it (none for text). A value that has an interval is
written as `value [low, high]`. Tables stand between `<!--NAME-->` and `<!--/NAME-->`:
`connectors` and `offloads` are made of the observatory's cells, `occasions` of the
committed sweeps, `synthetic` and `noisy` of the sweeps of that profile and beside a
neighbour, `coverage` of the result of `python -m benchmarks coverage`, and `rules` of
that of studies.questions. A test compares all of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from typing import Any

import msgspec

from kvtax.axes.matrix import read_all_cells
from kvtax.axes.page import ARROW, idle_us, step_ratios
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.per_config import Evidence
from kvtax.report.markdown import DASH, TIMES, table
from kvtax.verdict.analysis import judge
from kvtax.verdict.axes import AXES, growth
from kvtax.verdict.roles import outcomes
from tools import occasions

MARK = re.compile(
    r"(<!--sweep (?P<keys>[\w.]+)(?: (?P<format>[^\s>-]+))?-->)[^<]*(<!--/-->)"
)


TABLE = re.compile(
    r"<!--(?P<name>connectors|offloads|occasions|coverage|synthetic|noisy|rules)-->\n"
    r".*?"
    r"<!--/(?P=name)-->",
    re.DOTALL,
)
RESULTS = REPOSITORY / "benchmarks" / "results"
COVERAGE = RESULTS / "coverage.json.gz"
SYNTHETIC = RESULTS / "synthetic.json.gz"
NOISY = RESULTS / "noisy.json.gz"
# Release of the tables of connectors, and their rows: words, config, the same fixed.
RELEASE = "0.33.0"
CONNECTORS = (
    ("no-op", "noop", None),
    ("NIXL, its idle thread paused", "nixl_both", None),
    ("NIXL push, paused", "observatory/nixl_push", "observatory/nixl_push_fixed"),
    ("Mooncake", "mooncake_both", "mooncake_both_fixed"),
    (
        "Mooncake store",
        "observatory/mooncake_store",
        "observatory/mooncake_store_fixed",
    ),
    ("UMBP", "observatory/umbp", None),
    ("Offloading", "observatory/offloading", "observatory/offloading_fixed"),
    ("CPU offload, simple", "observatory/simple_cpu_offload", None),
    ("CPU offload, lazy", "observatory/simple_cpu_offload_lazy", None),
    ("LMCache, multi-process", "observatory/lmcache_mp", None),
    ("Mooncake and NIXL in one", "observatory/multi_mooncake_nixl", None),
    (
        "the study's fork: a walk of all hashes",
        "mooncake_both_hash_sync",
        "mooncake_both_fixed",
    ),
)


# Rules of routers, and their arms: where little is shared, and on agents' sessions.
RULES = (
    ("pending prefill + new tokens, no knob", "lpwl"),
    ("LMetric for Dynamo", "lmetric_dynamo"),
    ("LMetric of its paper", "lmetric"),
    ("Dynamo's sum, agentic weights", "dynamo_agentic"),
    ("Dynamo's sum, default weights", "dynamo"),
    ("LMetric for llm-d, no queue", "lmetric_llm_d"),
    ("llm-d's default scorers", "llm_d"),
)
RULES_OF = ("rules_chat", "rules_agents")
RULES_LOAD = 6


# Rows of the offloads, which keep KV and find nothing; and the columns' axes.
OFFLOADS = (
    ("Offloading", "observatory/offloading"),
    ("Offloading with our fix", "observatory/offloading_fixed"),
    ("SimpleCPUOffload, eager", "observatory/simple_cpu_offload"),
    ("SimpleCPUOffload, lazy", "observatory/simple_cpu_offload_lazy"),
)
OFFLOAD_AXES = ("running", "context")


class FigureError(Exception):
    """A mark names a value that is not there; the message says which."""


def written(page: str, document: dict[str, Any]) -> str:
    """Return a page with each marked figure as per_config.json has it.

    Raises FigureError for a mark whose value does not exist.
    """

    def figure(mark: re.Match[str]) -> str:
        value: Any = document | document["configs"]
        for key in mark["keys"].split("."):
            if not isinstance(value, dict) or key not in value:
                raise FigureError(
                    f"per_config.json has no {mark['keys']!r} for {mark[0]}"
                )
            value = value[key]
        return mark[1] + _text(value, mark["format"] or "") + mark[4]

    return TABLE.sub(_table, MARK.sub(figure, page))


def _table(mark: re.Match[str]) -> str:
    name = mark["name"]
    return f"<!--{name}-->\n{MADE[name]()}\n<!--/{name}-->"


def _connectors() -> str:
    """Make the table of connectors from the cells of RELEASE."""
    cells = read_all_cells()
    rows = []
    for words, config, fixed in CONNECTORS:
        cell = cells[RELEASE, config]
        after = _us(idle_us(cells[RELEASE, fixed])) if fixed else DASH
        idle = cell.idle
        rows.append(
            [
                words,
                _us(idle_us(cell)),
                after,
                _us(_connector_us(cell, "running", 256)),
                _us(_connector_us(cell, "arrivals", 8)),
                DASH if idle is None else f"{max(idle.cpu_ms_per_s, 0):.0f}",
            ]
        )
    head = ["µs per step", "idle", "idle, fixed", "256 running", "8 arrivals"]
    return table([*head, "threads, ms per idle s"], rows)


def _connector_us(cell: CellRecord, axis: str, level: int) -> float | None:
    """Return the time of all calls per step at a level; None if it was not held."""
    along = growth(cell, axis, "connector_us")
    if along is None or level not in along.levels:
        return None
    return along.level_us[along.levels.index(level)]


def _us(us: float | None) -> str:
    return DASH if us is None else f"{us:,.0f}"


def _offloads() -> str:
    """Make the table of offloads without hits: steps over a no-op's, at both ends."""
    cells = read_all_cells()
    rows = [
        [words, *(_ends(cells[RELEASE, config], axis) for axis in OFFLOAD_AXES)]
        for words, config in OFFLOADS
    ]
    head = [f"step over a no-op's ({TIMES}), and µs of the connector"]
    head += [
        f"{levels[0]:,} {ARROW} {levels[-1]:,} {AXES[axis].units}"
        for axis in OFFLOAD_AXES
        for levels in (AXES[axis].levels,)
    ]
    return table(head, rows)


def _occasions() -> str:
    """Make the table of the committed sweeps."""
    return occasions.report(occasions.committed())


def _coverage() -> str:
    """Make the table of the coverage of intervals."""
    result = json.loads(gzip.decompress(COVERAGE.read_bytes()))
    return f"{table(result['head'], result['rows'])}\n\n{result['note']}"


def _synthetic() -> str:
    """Make the table of the profile `synthetic`: verdicts that are known before."""
    analysis = judge(read_document(SYNTHETIC, Evidence))
    known = outcomes(analysis.document, analysis.roles)
    right: dict[str, list[str]] = {}
    for outcome in known:
        if outcome.kind == "right":
            name = outcome.config.partition("/")[2]
            right.setdefault(outcome.expected, []).append(name)
    rows = [[verdict, ", ".join(names)] for verdict, names in right.items()]
    wrong = [str(outcome) for outcome in known if outcome.kind != "right"]
    count = f"Of {len(known)} verdicts {len(known) - len(wrong)} are right."
    return "\n\n".join([table(["verdict", "right for"], rows), count, *wrong])


def _noisy() -> str:
    """Make the table of the sweep beside a noisy neighbour."""
    machine = occasions.read(NOISY).machine
    if machine is None:
        raise FigureError(f"{NOISY} does not grade its machine")
    out = sum(server.left_out is not None for server in machine.servers)
    refused = "so nothing is judged" if machine.refused else "the others are judged"
    return (
        f"The machine is graded {machine.grade}: {out} of {len(machine.servers)} "
        f"servers shared their core, {refused}."
    )


def _rules() -> str:
    """Make the table of the routers' rules: mean TTFT against `linear`."""
    file = REPOSITORY / "studies" / "questions" / "result.json.gz"
    answers = json.loads(gzip.decompress(file.read_bytes()))
    ttft = {
        (experiment, row["arm"]): msgspec.convert(row["ttft"], Estimate)
        for experiment, answer in answers.items()
        for row in answer.get("rows", [])
        if row["against"] == "linear" and row["load"] == RULES_LOAD
    }
    rows = [
        [
            words,
            *(
                f"{level:+.1f}" if (level := ttft.get((experiment, arm))) else DASH
                for experiment in RULES_OF
            ),
        ]
        for words, arm in RULES
    ]
    head = ["mean TTFT against `linear`, %", "little is shared", "agents' sessions"]
    return table(head, rows)


MADE = {
    "connectors": _connectors,
    "offloads": _offloads,
    "occasions": _occasions,
    "coverage": _coverage,
    "synthetic": _synthetic,
    "noisy": _noisy,
    "rules": _rules,
}


def _ends(cell: CellRecord, axis: str) -> str:
    """Format both ends of an axis: the ratio of steps, the connector's time."""
    ratios, along = step_ratios(cell, axis), growth(cell, axis, "connector_us")
    if along is None or not ratios:
        return DASH
    first, last = ratios[0].value, ratios[-1].value
    return (
        f"{TIMES}{first:.2f} {ARROW} {last:.2f}, "
        f"{along.level_us[0]:,.0f} {ARROW} {along.level_us[-1]:,.0f}"
    )


def _text(value: Any, spec: str) -> str:
    if isinstance(value, dict):
        if value["ci95"] is None:
            return f"{value['value']:{spec}}"
        low, high = value["ci95"]
        return f"{value['value']:{spec}} [{low:{spec}}, {high:{spec}}]"
    return f"{value:{spec}}"


def sweep() -> dict[str, Any]:
    """Read the committed sweep."""
    document: dict[str, Any] = json.loads((REPOSITORY / "per_config.json").read_text())
    return document


def main() -> int:
    """Rewrite the pages, name those that changed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    document = sweep()
    listed = subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=REPOSITORY,
        check=True,
        text=True,
        capture_output=True,
    )
    changed = {}
    for page in (REPOSITORY / name for name in listed.stdout.splitlines()):
        old = page.read_text()
        try:
            new = written(old, document)
        except FigureError as error:
            print(f"figures: {page}: {error}: no page is written", file=sys.stderr)
            return 2
        if new != old:
            changed[page] = new
    for page, new in changed.items():
        page.write_text(new)
        print(f"figures: {page.relative_to(REPOSITORY)} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
