# SPDX-License-Identifier: Apache-2.0
"""Made-up runs and steps of holds; copies of per_config.json, `kvtax compare`."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import msgspec
import polars as pl
import pytest

from kvtax.cli import main
from kvtax.paths import REPOSITORY
from kvtax.records.requests import Phase
from kvtax.steps.trial_steps import PLACE, READING_SCHEMA, STEP_TIMES
from kvtax.verdict.analysis import analyse
from kvtax.verdict.trials import load_run
from microbench.profile import load_profile
from tests.microbench.synthetic import LADDER, Truth, write_run

COMMITTED = REPOSITORY / "per_config.json"
TRUTHS = [
    Truth("plain"),
    Truth("noop", build_meta=0.8, get_finished=0.8),
    Truth("mooncake_both", build_meta=1.0, get_finished=70.0),
    Truth("mooncake_both_hash_sync", slope=60.0, build_meta=2.0, get_finished=70.0),
    Truth("plain_aa"),
]
Run = dict[str, Any]


class Gate(NamedTuple):
    """What the command did."""

    status: int
    text: str
    error: str
    cases: dict[tuple[str, str], str]
    """By config and limit: passed, skipped or failure."""


def cases(junit: Path) -> dict[tuple[str, str], str]:
    if not junit.exists():
        return {}
    suite = ElementTree.parse(junit).getroot()
    outcome_by_case = {
        (case.get("classname").removeprefix("kvtax."), case.get("name")): (
            case[0].tag if len(case) else "passed"
        )
        for case in suite
    }
    outcomes = list(outcome_by_case.values())
    assert int(suite.get("tests")) == len(outcomes)
    assert int(suite.get("failures")) == outcomes.count("failure")
    assert int(suite.get("skipped")) == outcomes.count("skipped")
    return outcome_by_case


def changed(run: Run, config: str, **fields: Any) -> Run:
    new = copy.deepcopy(run)
    new["configs"][config] |= fields
    return new


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="session")
def made_up(tmp_path_factory) -> Run:
    """The results of a made-up run of the profile `cpu`."""
    profile = load_profile("cpu")
    load = msgspec.structs.replace(profile.load, ladder=LADDER)
    # Made-up steps do not sleep.
    profile = msgspec.structs.replace(profile, load=load, forward_us=0)
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, TRUTHS, repeats=2, steps=2_000, profile=profile)
    run, trials = load_run(folder)
    return msgspec.to_builtins(analyse(run, trials, None).document)


@pytest.fixture
def run(made_up) -> Run:
    """The made-up run, to change."""
    return json.loads(json.dumps(made_up))


@pytest.fixture
def gate(tmp_path, capsys):
    def compare(old: Run, new: Run, limits: str = "") -> Gate:
        paths = [tmp_path / "old.json", tmp_path / "new.json"]
        for path, document in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps(document))
        toml, junit = tmp_path / "limits.toml", tmp_path / "junit.xml"
        toml.write_text(limits)
        junit.unlink(missing_ok=True)
        status = main(
            ["compare", *map(str, paths), "--limits", str(toml), "--junit", str(junit)]
        )
        said = capsys.readouterr()
        return Gate(status, said.out, said.err, cases(junit))

    return compare


TIMES = (*STEP_TIMES, "overhead_us", "connector_us", "worker_calls_us")
MS = 1_000_000


def hold(
    repeat: int = 0,
    number: int = 0,
    level: int = 0,
    *,
    steps: int = 40,
    at_s: float | None = None,
    cache_blocks: int | Sequence[int] = 1_000,
    **columns: float | Sequence[float] | None,
) -> pl.DataFrame:
    """Make steps of the `number`-th hold, decodes of 8 requests.

    A step takes 300 us: 100 us each for scheduler and connector, for the model, and for
    vLLM's own work; every other time is 100 us, too. They begin at `at_s`, 1 ms apart;
    by default a hold takes 10 s.
    """
    at_s = 10 * number if at_s is None else at_s
    given = dict.fromkeys(TIMES, 100.0) | {
        "repeat": repeat,
        "phase": int(Phase.HOLD),
        "hold": number,
        "level": level,
        "decoders": 8,
        "age_s": 0.0,
        "batch": 8,
        "cache_blocks": cache_blocks,
        "decode_only": True,
        "prefills": False,
        "t_ns": [round(at_s * 1e9) + step * MS for step in range(steps)],
        "step_id": range(steps),
        "step_us": 300.0,
        "forward_us": 100.0,
        "schedule_cpu_us": None,
        "thread_cpu_us": None,
    }
    filled = {
        name: [value] * steps if isinstance(value, int | float | None) else value
        for name, value in (given | columns).items()
    }
    times = [name for name in filled if name.endswith("_us")]
    schema = dict.fromkeys(times, pl.Float64) | {"cache_blocks": pl.Int64}
    schema |= {name: READING_SCHEMA[name] for name in ("repeat", *PLACE)}
    return pl.DataFrame(filled, schema_overrides=schema)


def reading(
    repeat: int = 0, number: int = 0, level: int = 0, **columns: float
) -> pl.DataFrame:
    """Make what the driver read of a hold."""
    row = dict.fromkeys(READING_SCHEMA) | columns
    row |= {"repeat": repeat, "hold": number, "level": level, "decoders": 8}
    schema = READING_SCHEMA | dict.fromkeys(columns.keys(), pl.Float64)
    return pl.DataFrame([row], schema=pl.Schema(schema))
