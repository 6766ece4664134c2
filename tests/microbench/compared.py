# SPDX-License-Identifier: Apache-2.0
"""Copies of the committed per_config.json with something changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from lab.paths import REPOSITORY

COMMITTED = REPOSITORY / "per_config.json"
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
                stated["floor"] *= times_slower
    return new


def scale(stated: dict[str, Any] | None, by: float) -> None:
    if stated is not None:
        stated["value"] *= by
        stated["ci95"] = stated["ci95"] and [edge * by for edge in stated["ci95"]]
