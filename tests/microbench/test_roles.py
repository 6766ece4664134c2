# SPDX-License-Identifier: Apache-2.0
"""What a config is to a report stands in its TOML and in run.json, never in code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic import Truth, write_run

from lab.paths import CONFIGS
from lab.records.run import RunRecord
from lab.serving.connector import load_connector
from microbench import report
from microbench.analysis.roles import roles_of

pytestmark = pytest.mark.slow

CONNECTORS = sorted(file.stem for file in (CONFIGS / "connectors").glob("*.toml"))
TRUTHS = [
    Truth("plain"),
    Truth("plain_aa"),
    Truth("noop", build_meta=0.8),
    Truth("mooncake_both_hash_sync", slope=60.0, build_meta=2.0),
    Truth("mooncake_both_fixed", build_meta=1.0),
]


def reported(folder: Path, truths: list[Truth], **run: Any) -> tuple[Any, str]:
    """per_config.json and SUMMARY.md of a made-up run."""
    write_run(folder, truths, repeats=1, steps=1_500, **run)
    assert report.main([str(folder)]) == 0
    document = json.loads((folder / "per_config.json").read_text())
    return document, (folder / "SUMMARY.md").read_text()


def test_a_run_carries_the_roles_that_its_configs_had():
    written = {
        name: msgspec.to_builtins(load_connector(name).report) for name in CONNECTORS
    }
    told = roles_of(msgspec.convert({"configs": written}, RunRecord), CONNECTORS)
    assert told == roles_of(RunRecord(), CONNECTORS)
    assert (told.baseline, told.twin, told.floor) == ("plain", "plain_aa", "noop")


def test_other_names_with_the_same_roles_give_the_same_report(tmp_path: Path):
    names = {truth.name: f"config_{n}" for n, truth in enumerate(TRUTHS)}
    roles = {
        names[old]: msgspec.to_builtins(load_connector(old).report) for old in names
    }
    renamed = [replace(truth, name=names[truth.name]) for truth in TRUTHS]
    # The roles of the first run are those of the TOML files.
    first, summary = reported(tmp_path / "a", TRUTHS)
    second, other = reported(tmp_path / "b", renamed, configs=roles)
    # Longer names first: one is the start of another.
    for old in sorted(names, key=len, reverse=True):
        other = other.replace(names[old], old)
    assert other == summary
    assert list(second["configs"].values()) == list(first["configs"].values())


def test_a_config_without_a_role_is_measured_like_any_other(tmp_path: Path):
    document, summary = reported(
        tmp_path, [Truth("newcomer", build_meta=3.0)], configs={"newcomer": {}}
    )
    entry = document["configs"]["newcomer"]
    assert entry["verdict"] != "failed" and entry["schedule_us"]["p50"] > 0
    assert entry["vs_plain"] is None and entry["vs_noop"] is None
    assert "| `newcomer` |" in summary


def test_of_two_baselines_the_first_counts_and_the_reader_is_told(tmp_path: Path):
    roles = {name: {"role": "baseline"} for name in ("first", "second")}
    document, _ = reported(tmp_path, [Truth("first"), Truth("second")], configs=roles)
    assert document["configs"]["first"]["vs_plain"] is None
    assert document["configs"]["second"]["vs_plain"]
    assert any("first, second have the role" in text for text in document["warnings"])


def test_an_unknown_role_in_run_json_is_a_clear_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    configs = {"plain": {"role": "referee"}}
    folder = write_run(tmp_path, TRUTHS[:1], repeats=1, steps=300, configs=configs)
    assert report.main([str(folder)]) == 1
    message = capsys.readouterr().err
    assert "run.json: " in message and "'referee' - at `$.configs" in message
