# SPDX-License-Identifier: Apache-2.0
"""A made-up run, changed copies of its per_config.json, and `kvtax compare`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import msgspec
import pytest

from kvtax.cli import main
from kvtax.paths import REPOSITORY
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
    found = {
        (case.get("classname").removeprefix("kvtax."), case.get("name")): (
            case[0].tag if len(case) else "passed"
        )
        for case in suite
    }
    outcomes = list(found.values())
    assert int(suite.get("tests")) == len(outcomes)
    assert int(suite.get("failures")) == outcomes.count("failure")
    assert int(suite.get("skipped")) == outcomes.count("skipped")
    return found


def changed(run: Run, config: str, **fields: Any) -> Run:
    new = copy.deepcopy(run)
    new["configs"][config] |= fields
    return new


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def on_a_machine(run: Run, times_slower: float, config: str | None = None) -> Run:
    """The run where every time, or every time of one config, is that much longer."""
    new = copy.deepcopy(run)
    for name, entry in new["configs"].items():
        if config not in (None, name):
            continue
        for slope in entry["slope_us_per_1k_blocks"].values():
            scale(slope, times_slower)
        for difference in (entry["vs_plain"] or {}).values():
            scale(difference, times_slower)
        for time in ("schedule", "overhead", "step"):
            for quantile in ("p50", "p90", "p99"):
                entry[f"{time}_us"][quantile] *= times_slower
    if config is None:
        for noise in (
            new["noise_floor"][k] for k in ("p50_us", "slope_us_per_1k_blocks")
        ):
            for stated in noise.values():
                scale(stated, times_slower)
    return new


def scale(stated: dict[str, Any] | None, by: float) -> None:
    if stated is not None:
        stated["value"] *= by
        stated["ci95"] = stated["ci95"] and [edge * by for edge in stated["ci95"]]


@pytest.fixture(scope="session")
def made_up(tmp_path_factory) -> Run:
    """The results of a made-up run of the profile `cpu`."""
    profile = load_profile("cpu")
    load = msgspec.structs.replace(profile.load, ladder=LADDER)
    profile = msgspec.structs.replace(profile, load=load)
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
