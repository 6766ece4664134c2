# SPDX-License-Identifier: Apache-2.0
"""`kvtax compare`: two sweeps or two gates, limits, and what changed."""

from __future__ import annotations

import gzip
import json
from itertools import permutations
from math import inf

import msgspec
import pytest

from kvtax.cli import main
from kvtax.paths import CONFIGS, REPOSITORY
from kvtax.records.estimate import Estimate
from kvtax.records.files import write_document
from kvtax.records.per_config import Evidence
from kvtax.verdict.analysis import judge
from kvtax.verdict.bounds import Bound, Check, headline
from kvtax.verdict.bounds import judge as judge_bound
from kvtax.verdict.changes import (
    MOST_APART,
    are_comparable,
    compare_sweeps,
    sweep_changes,
)
from tests.harness.made_up import made
from tests.verdict.conftest import changed, section

SWEEPS = REPOSITORY / "benchmarks" / "results" / "sweeps"
WALK = "mooncake_both_hash_sync"


@pytest.mark.slow
def test_a_run_compared_with_itself_passes_and_nothing_changed(run, gate):
    shown = gate(run, run)
    assert shown.status == 0 and shown.error == ""
    assert "Cost gate: passed" in shown.text
    assert "**" not in section(shown.text, "What changed").partition("**Bold**")[0]


def share(run, config: str, field: str, factor: float):
    """Return the run with one figure of a config times `factor`."""
    figure = json.loads(json.dumps(run["configs"][config][field]))
    percent = figure["percent"]
    percent["value"] *= factor
    percent["ci95"] = [factor * end for end in percent["ci95"]]
    return changed(run, config, **{field: figure})


def test_a_cost_that_certainly_rose_is_bold_and_fails(run, gate):
    shown = gate(run, share(run, WALK, "full_adds", 1.6))
    assert shown.status == 1
    lines = [line for line in shown.text.splitlines() if WALK in line and "**" in line]
    assert any("a full cache adds" in line for line in lines)
    assert shown.cases[WALK, "a full cache adds, since OLD"] == "failure"


def test_a_cost_that_certainly_fell_is_bold_and_passes(run, gate):
    shown = gate(run, share(run, WALK, "full_adds", 0.5))
    assert shown.status == 0 and "**-" in section(shown.text, "What changed")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("flat", "flat", "passed"),
        ("flat", "grows", "failure"),
        ("flat", "stalls", "failure"),
        ("drifts", "grows", "failure"),
        ("flat", "inconclusive", "skipped"),
        ("inconclusive", "inconclusive", "passed"),
        ("grows", "flat", "passed"),
        ("flat", "failed", "failure"),
    ],
)
def test_a_verdict_must_not_get_worse(run, gate, before, after, outcome):
    old, new = (changed(run, "noop", verdict=verdict) for verdict in (before, after))
    shown = gate(old, new)
    assert shown.cases["noop", "verdict"] == outcome
    assert shown.status == (outcome == "failure")


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ("over_baseline = { step = 900 }", "passed"),
        ("over_baseline = { step = 1 }", "failure"),
        ("full_adds = { timed = 900 }", "passed"),
        ("full_adds = { timed = 1 }", "failure"),
        ('verdicts = ["grows"]', "passed"),
        ('verdicts = ["flat"]', "failure"),
    ],
)
def test_a_limit_is_of_a_config_in_percent_of_own_work(run, gate, limits, outcome):
    shown = gate(run, run, f"[configs.{WALK}]\n{limits}")
    outcomes = {result for (name, _), result in shown.cases.items() if name == WALK}
    assert outcome in outcomes
    assert shown.status == (outcome == "failure")


def test_the_method_that_makes_a_config_grow_is_named_and_can_be_limited(run, gate):
    method = "scheduler.build_connector_meta"
    shown = gate(run, run, f'[configs.{WALK}]\nverdicts = ["flat"]')
    assert f"verdict is grows, `{method}` +" in shown.text
    limits = f'[configs.{WALK}]\nfull_adds = {{ "{method}" = 1 }}'
    shown = gate(run, run, limits)
    assert shown.cases[WALK, f"what a full cache adds to {method}"] == "failure"


def test_a_control_sign_in_a_name_reaches_neither_terminal_nor_junit(run, gate):
    shown = gate(run, run, '[configs."con\\u001b[31mred"]\nverdicts = ["flat"]')
    assert shown.cases["con\\x1b[31mred", "verdict"] == "failure"
    assert "\x1b" not in shown.text and "con\\x1b[31mred" in shown.text


def test_what_one_config_says_goes_before_the_default(run, gate):
    default = "[configs.default]\nfull_adds = { timed = 1 }\n"
    own = f"[configs.{WALK}]\nfull_adds = {{ timed = 900 }}"
    assert gate(run, run, default).status == 1
    shown = gate(run, run, default + own)
    assert shown.cases[WALK, "what a full cache adds to timed"] == "passed"


def test_an_undecided_limit_fails_only_where_the_file_says_so(run, gate):
    value = run["configs"]["noop"]["held"]["timed"]["full_adds"]["value"]
    limits = f"[configs.noop]\nfull_adds = {{ timed = {value:.3f} }}"
    what = ("noop", "what a full cache adds to timed")
    shown = gate(run, run, limits)
    assert (shown.status, shown.cases[what]) == (0, "skipped")
    strict = gate(run, run, f'undecided = "fail"\n{limits}')
    assert (strict.status, strict.cases[what]) == (1, "failure")


def test_a_config_that_is_gone_is_seen_and_fails_where_it_has_limits(run, gate):
    new = json.loads(json.dumps(run))
    del new["configs"]["noop"]
    assert gate(run, new).cases["noop", "verdict"] == "skipped"
    shown = gate(run, new, '[configs.noop]\nverdicts = ["flat"]')
    assert shown.cases["noop", "verdict"] == "failure"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("[configs.noop]\nfull_adds = { tmied = 1 }", "'tmied'"),
        ("[configs.noop]\nslope = 1", "slope"),
        ("[axes.cashe]\nslope_us = { connector = 1 }", "cashe"),
    ],
)
def test_a_misspelt_limit_is_refused_and_not_ignored(run, gate, limits, message):
    shown = gate(run, run, limits)
    assert shown.status == 2 and message in shown.error


def test_other_settings_are_refused_and_more_repeats_are_not(run, gate):
    new = json.loads(json.dumps(run))
    new["profile"]["repeats"] += 1
    assert gate(run, new).status == 0
    new["profile"]["block_size"] = 32
    shown = gate(run, new)
    assert shown.status == 2 and "block_size: 16 and 32" in shown.error


def test_another_machine_and_another_baseline_are_named(run, gate):
    new = json.loads(json.dumps(run))
    new["provenance"]["cpu_model"], new["baseline"] = "another", "noop"
    text = gate(run, new).text
    assert "Different machines, cpu_model" in text and "The baselines differ" in text


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_file_is_bad_input_and_no_broken_limit(tmp_path, capsys, missing):
    paths = [str(tmp_path), str(REPOSITORY / "per_config.json")]
    order = paths if missing == 0 else paths[::-1]
    assert main(["compare", *order]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.slow
def test_two_gates_are_compared_in_the_same_table(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write_document(old, made())
    write_document(new, made(cache=lambda level: 10.0 + 0.1 * level))
    assert main(["compare", str(old), str(old)]) == 0
    assert "Cost gate: passed" in capsys.readouterr().out
    assert main(["compare", str(old), str(new)]) == 1
    text = capsys.readouterr().out
    assert "| `cache` | slope, µs per 1,000 cached blocks |" in text
    row = next(line for line in text.splitlines() if line.startswith("| `cache` |"))
    assert row.rpartition("| **")[2].startswith(("+9", "+10"))
    assert main(["compare", str(old), str(REPOSITORY / "per_config.json")]) == 2
    assert "two of a kind" in capsys.readouterr().err


def test_the_example_limits_are_kept_by_the_committed_run(capsys):
    committed = str(REPOSITORY / "per_config.json")
    limits = str(CONFIGS / "limits" / "ci.toml")
    status = main(["compare", committed, committed, "--limits", limits])
    assert status == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def sweeps() -> list[Evidence]:
    files = [*sorted(SWEEPS.glob("*.json.gz")), REPOSITORY / "evidence.json.gz"]
    return [
        msgspec.json.decode(gzip.decompress(file.read_bytes()), type=Evidence)
        for file in files
    ]


def dearer(evidence: Evidence, config: str) -> Evidence:
    """Return the sweep in which every time of a config is a fifth longer."""
    of = evidence.configs[config]
    holds = of.holds | {
        name: [value and 1.2 * value for value in of.holds[name]]
        for name in ("timed", "timed_many", "calls", "calls_many")
        if name in of.holds
    }
    configs = {config: msgspec.structs.replace(of, holds=holds)}
    return msgspec.structs.replace(evidence, configs=evidence.configs | configs)


@pytest.mark.slow
def test_unchanged_code_has_no_change_between_days_and_a_fifth_more_is_found(sweeps):
    documents = [judge(evidence).document for evidence in sweeps]
    worse = [judge(dearer(evidence, WALK)).document for evidence in sweeps]
    pairs = list(permutations(range(len(documents)), 2))
    for old, new in pairs:
        changes = sweep_changes(documents[old], documents[new])
        assert not [change for change in changes if change.changed]
    pairs = [(o, n) for o, n in pairs if are_comparable(documents[o], documents[n])]
    assert len(pairs) >= 12
    hits = sum(
        any(
            c.changed and c.subject == WALK
            for c in sweep_changes(documents[o], worse[n])
        )
        for o, n in pairs
    )
    assert hits >= 0.9 * len(pairs)


@pytest.mark.slow
def test_machines_too_far_apart_are_not_compared_and_that_comes_first(sweeps):
    runs = [judge(evidence).document for evidence in sweeps]
    old, new = (
        chosen(runs, key=lambda run: run.machine.own_us) for chosen in (min, max)
    )
    assert new.machine.own_us > MOST_APART * old.machine.own_us
    comparison = compare_sweeps(old, new)
    assert not [change for change in comparison.changes if change.changed]
    assert "no cost is called changed" in comparison.cautions[0]


@pytest.mark.parametrize(
    ("ci95", "outcome"),
    [
        ((1.0, 3.0), "kept"),
        ((2.9, 3.1), "undecided"),
        ((3.1, 5.0), "broken"),
        ((-inf, inf), "undecided"),
        (None, "undecided"),
    ],
)
def test_a_limit_is_broken_only_where_the_whole_interval_is_beyond_it(ci95, outcome):
    assert judge_bound(Estimate(3.0, ci95), Bound("a step", 3.0)) == outcome


def test_a_gate_says_how_many_limits_are_broken_and_undecided():
    checks = [
        Check("noop", "verdict", "flat", "grows", "broken", True),
        Check("noop", "step", "at most 1", "1 [0, 2]", "undecided", False),
        Check("plain", "verdict", "flat", "flat", "kept", False),
    ]
    assert headline(checks) == ("Cost gate: failed. 1 of 3 limits broken, 1 undecided")
    assert headline(checks[1:]).startswith("Cost gate: passed. 0 of 2")
    assert headline([]) == "Cost gate: no limits given"
