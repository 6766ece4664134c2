# SPDX-License-Identifier: Apache-2.0
"""Write committed figures into the pages that quote them.

    python -m tools.figures      rewrites every marked figure

A mark is a pair of comments around a figure:

    <!--sweep plain.schedule_us.p50 ,.0f-->287<!--/-->

It names a config of per_config.json, a value of it by keys with dots between them, and
the value's format as Python writes it (none for text). A value that has an interval is
written as `value [low, high]`. Tables stand between `<!--NAME-->` and `<!--/NAME-->`:
`connectors` and `offloads` are made of the observatory's cells, `leases`, `polls` and
`pulls` of the result of studies.pending, `occasions` of the committed sweeps,
`synthetic` and `noisy` of the sweeps of that profile and beside a neighbour, and
`coverage` of the result of `kvtax bench coverage`, and `rules` of that of
studies.questions. A test compares all of them.
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

from kvtax.axes.matrix import read_all_cells, read_pending
from kvtax.axes.page import ARROW, axes_of_growth, idle_us
from kvtax.engine.releases import known_releases
from kvtax.paths import REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import read_document
from kvtax.records.observatory_cell import CellRecord
from kvtax.records.per_config import Evidence
from kvtax.report.markdown import DASH, table
from kvtax.verdict.analysis import judge
from kvtax.verdict.axes import AXES, growth
from kvtax.verdict.roles import outcomes
from tools import occasions

MARK = re.compile(
    r"(<!--sweep (?P<keys>[\w.]+)(?: (?P<format>[^\s>-]+))?-->)[^<]*(<!--/-->)"
)


PARTS_OF_PENDING = ("leases", "polls", "pulls")
TABLE = re.compile(
    r"<!--(?P<name>connectors|offloads|occasions|coverage|synthetic|noisy|rules|"
    rf"{'|'.join(PARTS_OF_PENDING)})-->\n"
    r".*?"
    r"<!--/(?P=name)-->",
    re.DOTALL,
)
RESULTS = REPOSITORY / "benchmarks" / "results"
COVERAGE = RESULTS / "coverage.json.gz"
SYNTHETIC = RESULTS / "synthetic.json.gz"
NOISY = RESULTS / "noisy.json.gz"
# Release of the table, and its rows: words, config, the same with the fix.
RELEASE = "0.32.0"
CONNECTORS = (
    ("NIXL", "nixl_both", None),
    ("NIXL, push", "observatory/nixl_push", "observatory/nixl_push_fixed"),
    ("Mooncake", "mooncake_both", "mooncake_both_fixed"),
    (
        "Mooncake store",
        "observatory/mooncake_store",
        "observatory/mooncake_store_fixed",
    ),
    ("Offloading", "observatory/offloading", "observatory/offloading_fixed"),
    ("CPU offload, simple", "observatory/simple_cpu_offload", None),
    ("LMCache, multi-process", "observatory/lmcache_mp", None),
    (
        "Mooncake with a walk of all hashes",
        "mooncake_both_hash_sync",
        "mooncake_both_fixed",
    ),
)


# Rules of routers, and their arms: where little is shared, and on agents' sessions.
RULES = (
    ("pending prefill + new tokens, no knob", "lpwl", "rules_chat", "rules_agents"),
    ("Dynamo's sum, prefill weighted 8", "dynamo_scaled", "rules_chat", "rules_agents"),
    ("LMetric for Dynamo", "lmetric_dynamo", "rules_chat", "rules_agents"),
    ("LMetric of its paper", "lmetric", "rules_chat", "rules_agents"),
    ("Dynamo's sum as it is", "dynamo", "routers_mooncake", "routers_question"),
    ("LMetric for llm-d, no queue", "lmetric_llm_d", "rules_chat", "rules_agents"),
    ("llm-d's scorers", "llm_d", "rules_chat", "rules_agents"),
)
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


def written(page: str, configs: dict[str, Any]) -> str:
    """Return a page with each marked figure as `configs` of per_config.json has it.

    Raises FigureError for a mark whose value does not exist.
    """

    def figure(mark: re.Match[str]) -> str:
        value: Any = configs
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
    made = _pending(name) if name in PARTS_OF_PENDING else MADE[name]()
    return f"<!--{name}-->\n{made}\n<!--/{name}-->"


def _connectors() -> str:
    """Make the table of connectors from the cells of RELEASE."""
    cells = read_all_cells()
    rows = []
    for words, config, fixed in CONNECTORS:
        after = _cost(cells[RELEASE, fixed]) if fixed else DASH
        rows.append([words, _cost(cells[RELEASE, config]), after])
    return table(["connector", "idle, µs per step", "fixed"], rows)


def _offloads() -> str:
    """Make the table of offloads without hits, by release, at both ends of an axis."""
    cells = read_all_cells()
    rows = [
        [words, release, f"{idle_us(cell):.0f}", *_ends(cell)]
        for words, config in OFFLOADS
        for release in known_releases()
        if (cell := cells.get((release, config))) and not cell.error
    ]
    head = ["connector", "release", "8 running"]
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
    for one in known:
        if one.kind == "right":
            right.setdefault(one.expected, []).append(one.config.partition("/")[2])
    rows = [[verdict, ", ".join(names)] for verdict, names in right.items()]
    wrong = [str(one) for one in known if one.kind != "right"]
    count = f"Of {len(known)} verdicts {len(known) - len(wrong)} are right."
    return "\n\n".join([table(["verdict", "right for"], rows), count, *wrong])


def _noisy() -> str:
    """Make the table of the sweep beside a noisy neighbour."""
    quiet = judge(read_document(occasions.COMMITTED, Evidence)).document.configs
    noisy = judge(read_document(NOISY, Evidence)).document.configs
    known = {name: one for name, one in noisy.items() if one.verdict != "inconclusive"}
    same = sum(one.verdict == quiet[name].verdict for name, one in known.items())
    return (
        f"{occasions.rows(occasions.read(NOISY))}\n\n"
        f"Of {len(noisy)} configs {same} get the verdict of the committed sweep, "
        f"{len(known) - same} another, and {len(noisy) - len(known)} are not known."
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
        [words, *(f"{ttft[experiment, arm]:+.1f}" for experiment in experiments)]
        for words, arm, *experiments in RULES
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


def _ends(cell: CellRecord) -> list[str]:
    found = [growth(cell, axis, "connector_us") for axis in OFFLOAD_AXES]
    return [
        f"{one.level_us[0]:,.0f} {ARROW} {one.level_us[-1]:,.0f}, {one.verdict}"
        if one
        else DASH
        for one in found
    ]


def _pending(part: str) -> str:
    """Make a part's table: a row per what was timed, a column per level."""
    rows = [row for row in read_pending() if row.part == part]
    levels = list(dict.fromkeys(row.level for row in rows))
    lines = [
        [
            what,
            *(
                f"{row.time:,.1f} {row.unit.replace('us', 'µs')}"
                for level in levels
                for row in rows
                if (row.what, row.level) == (what, level)
            ),
        ]
        for what in dict.fromkeys(row.what for row in rows)
    ]
    return table(["", *levels], lines)


def _cost(cell: CellRecord) -> str:
    """Describe the idle cost of a cell, and the axes along which it grows."""
    us, axes = idle_us(cell), axes_of_growth(cell)
    grows = f", grows with {', '.join(axes)}" if axes else ""
    return DASH if us is None else f"{us:.0f}{grows}"


def _text(value: Any, spec: str) -> str:
    if isinstance(value, dict):
        low, high = value["ci95"]
        return f"{value['value']:{spec}} [{low:{spec}}, {high:{spec}}]"
    return f"{value:{spec}}"


def sweep() -> dict[str, Any]:
    """Read the configs of the committed sweep."""
    return json.loads((REPOSITORY / "per_config.json").read_text())["configs"]


def main() -> int:
    """Rewrite the pages, name those that changed."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    configs = sweep()
    listed = subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=REPOSITORY,
        check=True,
        text=True,
        capture_output=True,
    )
    for page in (REPOSITORY / name for name in listed.stdout.splitlines()):
        old = page.read_text()
        try:
            new = written(old, configs)
        except FigureError as error:
            print(f"figures: {page}: {error}: correct the mark", file=sys.stderr)
            return 2
        if new != old:
            page.write_text(new)
            print(f"figures: {page.relative_to(REPOSITORY)} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
