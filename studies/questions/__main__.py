# SPDX-License-Identifier: Apache-2.0
"""Compare arms of runs in virtual time by the rule that was written before they ran.

The rule, the experiments and what was expected of them are in README.md. Prints a table
per run, in Markdown, and writes it with JSON. Experiments that the JSON has from
earlier calls stay in it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.comparison import Paired, paired
from kvtax_fleet.analyze.frames import requests_frame

from kvtax.records import RecordsError
from kvtax.records.estimate import Estimate
from kvtax.records.parts import existing, opened
from kvtax.report.markdown import table
from studies.harness import main, publish, rows_table

# Least difference of mean E2E that matters, in %.
MATTERS_PERCENT = 5.0
# Beside each arm with its baseline: what the expectations compare.
ALSO = (
    ("lmetric", "linear_tuned"),
    ("dynamo", "lmetric"),
    ("lmetric_exact", "lmetric"),
    ("elastic_layers", "elastic"),
    ("lmetric", "lpwl"),
    ("lmetric_llm_d", "lpwl"),
    ("lmetric_dynamo", "lpwl"),
    ("dynamo_scaled", "lpwl"),
    ("llm_d", "lpwl"),
    ("unified", "lpwl"),
)
# Runs in several settings: NAME and NAME-SETTING are one question.
IN_SETTINGS = "open_problems"
# Of five settings, so many give the same sign where a verdict survives.
SURVIVES_IN = 4
# Pairs that are registered for it.
OPEN = (
    ("elastic", "linear"),
    ("elastic_stay", "linear"),
    ("elastic_pool", "linear"),
    ("elastic_layers", "elastic"),
    ("lmetric_exact", "lmetric"),
)
# README.md says what these found.
NOT_SHOWN = ("routers_tuning", "routers_mooncake")
# Experiments whose slots are always full, so that E2E hardly differs.
BY_TTFT = ("rules_agents", "rules_chat")
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
QUANTILES = (0.5, 0.95, 0.99)


class Row(msgspec.Struct):
    """An arm against another at one load; differences of means, in %."""

    load: int
    arm: str
    against: str
    n: int
    ttft: Estimate
    tpot: Estimate
    e2e: Estimate
    shorter: Estimate
    verdict: str


class Level(msgspec.Struct):
    """An arm at one load, over all orders.

    Latencies are of the steady window, at QUANTILES; the others of all requests.
    """

    load: int
    arm: str
    ttft_ms: list[float]
    tpot_ms: list[float]
    requests_per_s: float
    cached_percent: float
    """Of the prompt tokens, those that the instance found cached."""
    most_to_mean: float
    """Prompt tokens of the instance that got most, over their mean."""


class Answer(msgspec.Struct):
    """An experiment's comparisons and levels, and the commit that ran it."""

    commit: str | None
    rows: list[Row]
    levels: list[Level] = []


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the runs to read, and --out for the page."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("runs/questions.md"))


def run(arguments: argparse.Namespace) -> int:
    """Print and write the page. Returns the exit code. Raises RecordsError."""
    answers = earlier(arguments.out.with_suffix(".json"))
    for folder in arguments.runs:
        arms = read_run(folder)
        commit = arms[0].info.versions.get("git_commit")
        requests = requests_frame(arms)
        answer = Answer(commit, compared(requests), levels(requests))
        answers[str(arms[0].info.experiment)] = answer
    parts = []
    for name, answer in answers.items():
        parts += [f"## {name}", rows_table(answer.rows, COMPARED)]
        if answer.levels:
            parts.append(rows_table(answer.levels, REACHED))
        parts.append(f"Run at {answer.commit}.")
    return publish("questions", arguments.out, parts, answers, {})


def earlier(page: Path) -> dict[str, Answer]:
    """Read the answers that an earlier call wrote; {} if there are none.

    Raises RecordsError.
    """
    file = existing(page)
    if file is None:
        return {}
    try:
        with opened(file) as content:
            document = msgspec.json.decode(content.read())
        del document["provenance"]
        return msgspec.convert(document, dict[str, Answer])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise RecordsError(
            f"{page}: no result of `python -m studies.questions`: {error}; "
            "take another --out"
        ) from None


def compared(requests: pl.DataFrame) -> list[Row]:
    """Compare each arm with its run's first, and the pairs of ALSO."""
    arms = requests["arm"].unique(maintain_order=True).to_list()
    loads: dict[int, list[str]] = {}
    for arm in arms:
        loads.setdefault(int(arm.partition("@")[2]), []).append(arm.partition("@")[0])
    rows = []
    for load, names in loads.items():
        baseline, *others = names
        pairs = [(arm, baseline) for arm in others]
        pairs += [p for p in ALSO if set(p) <= set(names) and p not in pairs]
        rows += [
            row
            for arm, against in pairs
            if (row := _row(requests, load, arm, against)) is not None
        ]
    return rows


def _row(requests: pl.DataFrame, load: int, arm: str, against: str) -> Row | None:
    found = paired(requests, f"{arm}@{load}", f"{against}@{load}")
    ttft, tpot, e2e = (found[metric] for metric in METRICS)
    if ttft is None or tpot is None or e2e is None:
        return None
    return Row(
        load,
        arm,
        against,
        e2e.n,
        ttft.percent,
        tpot.percent,
        e2e.percent,
        e2e.faster,
        verdict(e2e),
    )


def levels(requests: pl.DataFrame) -> list[Level]:
    """Compute what each arm reaches at each load."""
    found = []
    for arm in requests["arm"].unique(maintain_order=True):
        name, _, load = str(arm).partition("@")
        own = requests.filter(pl.col("arm") == arm, pl.col("status") == "ok")
        steady = own.filter(pl.col("window") == "steady")
        runs = own.group_by("repeat").agg(
            pl.len() * 1e9 / (pl.col("end_ns").max() - pl.col("sent_ns").min())
        )
        tokens = own.group_by("repeat", "instance").agg(pl.sum("usage_prompt_tokens"))
        balance = tokens.group_by("repeat").agg(
            pl.max("usage_prompt_tokens") / pl.mean("usage_prompt_tokens")
        )
        found.append(
            Level(
                load=int(load),
                arm=name,
                ttft_ms=_levels(steady["ttft_ms"]),
                tpot_ms=_levels(steady["tpot_ms"]),
                requests_per_s=round(_number(runs["len"].mean()), 3),
                cached_percent=round(
                    100
                    * _number(own["cached_tokens"].sum())
                    / _number(own["input_tokens"].sum()),
                    1,
                ),
                most_to_mean=round(_number(balance["usage_prompt_tokens"].mean()), 3),
            )
        )
    return found


def _number(value: Any) -> float:
    return float(value or 0)


def _levels(times_ms: pl.Series) -> list[float]:
    return [round(_number(times_ms.quantile(q)), 2) for q in QUANTILES]


def verdict(e2e: Paired) -> str:
    """Judge a difference of mean E2E by the rule of README.md."""
    interval = e2e.percent.ci95
    if interval is None:
        return "undecided"
    low, high = interval
    if low <= 0 <= high or abs(e2e.percent.value) < MATTERS_PERCENT:
        return "no difference that matters"
    return "worse" if low > 0 else "better"


COMPARED = {
    "per instance": "{row.load}",
    "arm": "`{row.arm}`",
    "against": "`{row.against}`",
    "n": "{row.n:,}",
    "TTFT %": "{row.ttft:+.1f}",
    "TPOT %": "{row.tpot:+.1f}",
    "E2E %": "{row.e2e:+.1f}",
    "E2E shorter in %": "{row.shorter.value:.0f}",
    "verdict": "{row.verdict}",
}
REACHED = {
    "per instance": "{row.load}",
    "arm": "`{row.arm}`",
    "TTFT p50/p95/p99, ms": "{row.ttft_ms[0]:,.0f} / {row.ttft_ms[1]:,.0f} / "
    "{row.ttft_ms[2]:,.0f}",
    "TPOT p50/p95/p99, ms": "{row.tpot_ms[0]:.1f} / {row.tpot_ms[1]:.1f} / "
    "{row.tpot_ms[2]:.1f}",
    "requests/s": "{row.requests_per_s:.2f}",
    "prompt cached or received, %": "{row.cached_percent:.1f}",
    "most loaded, of mean": "{row.most_to_mean:.2f}",
}


def figure(result: dict[str, Any]) -> str:
    """Return the differences of means in %, a table for each experiment."""
    answers = {
        name: msgspec.convert(document, Answer)
        for name, document in result.items()
        if name != "provenance"
    }
    settings = {
        name: answer for name, answer in answers.items() if name.startswith(IN_SETTINGS)
    }
    parts = [
        _differences(name, answer)
        for name, answer in answers.items()
        if name not in settings and name not in NOT_SHOWN
    ]
    return "\n\n".join(parts + ([_survival(settings)] if settings else []))


def _differences(name: str, answer: Answer) -> str:
    metric = "ttft" if name in BY_TTFT else "e2e"
    loads = sorted({row.load for row in answer.rows})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in answer.rows:
        pair = cells.setdefault((row.arm, row.against), {})
        pair[row.load] = f"{getattr(row, metric):+.1f}"
    lines = [
        [f"`{arm}`", f"`{against}`", *(of.get(load, "") for load in loads)]
        for (arm, against), of in cells.items()
    ]
    title = f"{name}, {metric.upper()}, at {str(answer.commit)[:7]}"
    return table([title, "against", *map(str, loads)], lines)


def _survival(settings: dict[str, Answer]) -> str:
    """Return each difference of mean E2E in each setting, and what survives."""
    found: dict[tuple[int, str, str], dict[str, Estimate]] = {}
    for name, answer in settings.items():
        for row in answer.rows:
            if (row.arm, row.against) in OPEN:
                pair = row.load, row.arm, row.against
                found.setdefault(pair, {})[name] = row.e2e
    commits = {str(answer.commit)[:7] for answer in settings.values()}
    titles = [name.partition("-")[2] or "as measured" for name in settings]
    head = [f"{IN_SETTINGS}, at {', '.join(sorted(commits))}", "against", "load"]
    lines = [
        [f"`{arm}`", f"`{against}`", str(load)]
        + [f"{of[name]:+.1f}" if name in of else "" for name in settings]
        + [survivor(list(of.values()))]
        for (load, arm, against), of in found.items()
    ]
    return table([*head, *titles, "verdict"], lines)


def survivor(settings: list[Estimate]) -> str:
    """Judge one difference over all settings by the second rule of README.md."""
    signs = Counter(map(_sign, settings))
    sign, count = signs.most_common(1)[0]
    if count < SURVIVES_IN or {"worse", "better"} <= signs.keys():
        return "depends on the setting"
    if sign != "no difference":
        return sign
    most = max(max(-one.low, one.high) for one in settings)
    return f"no difference above {most:.0f} %"


def _sign(e2e: Estimate) -> str:
    if e2e.ci95 is None:
        return "undecided"
    return "worse" if e2e.low > 0 else "better" if e2e.high < 0 else "no difference"


if __name__ == "__main__":
    main("questions", __doc__, configure, run)
