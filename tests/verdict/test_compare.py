# SPDX-License-Identifier: Apache-2.0
"""The cost gate: no false alarm where a limit holds, and nothing is kept silent."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtax.cli import main
from kvtax.paths import REPOSITORY
from kvtax.records.per_config import PerConfig
from kvtax.stats import Estimate
from kvtax.verdict.limits import Limits, LimitsFile, check_runs
from tests.verdict.conftest import COMMITTED, changed, on_a_machine, section


def assert_nothing_changed(text: str) -> None:
    assert "**" not in section(text, "What changed").partition("\n\nSlopes")[0]
    assert "## Broken" not in text


def test_a_run_compared_with_itself_passes_and_nothing_changed(run, gate):
    found = gate(run, run)
    assert (found.status, found.error) == (0, "")
    assert_nothing_changed(found.text)


def test_so_does_the_committed_run():
    command = [sys.executable, "-m", "kvtax", "compare", REPOSITORY, REPOSITORY]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert_nothing_changed(done.stdout)


def test_a_usual_run_keeps_the_example_limits(run, tmp_path, capsys):
    # Not the committed one: a slope in us also says how slow the machine was.
    limits, path = REPOSITORY / "configs/limits/ci.toml", tmp_path / "run.json"
    # With all fixes a connector costs what none does.
    fixed = {"mooncake_both_fixed": run["configs"]["plain_aa"]}
    path.write_text(json.dumps(run | {"configs": run["configs"] | fixed}))
    assert main(["compare", str(path), str(path), "--limits", str(limits)]) == 0
    assert "## Broken" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("flat", "grows", "failure"),
        ("flat", "drifts", "failure"),
        ("drifts", "grows", "failure"),
        ("inconclusive", "grows", "failure"),
        ("flat", "failed", "failure"),
        ("failed", "failed", "failure"),
        ("flat", "inconclusive", "skipped"),
        ("grows", "inconclusive", "skipped"),
        ("inconclusive", "inconclusive", "passed"),
        ("grows", "grows", "passed"),
        ("grows", "flat", "passed"),
    ],
)
def test_a_verdict_must_not_get_worse(run, gate, before, after, outcome):
    new = changed(run, "noop", verdict=after)
    found = gate(changed(run, "noop", verdict=before), new)
    assert found.cases["noop", "verdict"] == outcome
    assert found.status == (outcome == "failure")
    title = {"failure": "Broken", "skipped": "Undecided"}.get(outcome)
    if title:
        assert f"verdict is {after}" in section(found.text, title)


def test_growth_that_is_allowed_by_name_passes_and_nothing_else_does(run, gate):
    limits = '[configs.noop]\nverdicts = ["grows"]'
    assert gate(run, changed(run, "noop", verdict="grows"), limits).status == 0
    assert gate(run, changed(run, "noop", verdict="drifts"), limits).status == 1
    unsure = gate(run, changed(run, "noop", verdict="inconclusive"), limits)
    assert (unsure.status, unsure.cases["noop", "verdict"]) == (0, "skipped")


def test_the_method_that_makes_a_config_grow_is_named_and_can_be_limited(run, gate):
    methods = {
        name: {
            "calls_per_step": 1.0,
            "us_per_step": 9.0,
            "slope_per_1k_blocks": {"value": value, "ci95": [value - 1, value + 1]},
        }
        for name, value in {"worker.a": 0.5, "worker.b": 8.0, "worker.c": 30.0}.items()
    }
    new = changed(run, "noop", verdict="grows", methods=methods)
    limits = "[configs.noop.slope_us_per_1k_blocks]\n" + "".join(
        f'"{name}" = 2.0\n' for name in methods
    )
    found = gate(run, new, limits)
    grown = "`worker.c` +30 [+29, +31] µs per 1,000 blocks, `worker.b` +8 [+7, +9]"
    assert f"verdict is grows, {grown}" in section(found.text, "Broken")
    outcomes = {
        name: found.cases["noop", f"slope_us_per_1k_blocks of {name}"]
        for name in methods
    }
    assert list(outcomes.values()) == ["passed", "failure", "failure"]


@pytest.mark.parametrize(
    ("ci95", "outcome"),
    [
        ([0.0, 1.9], "passed"),
        ([1.0, 3.0], "skipped"),
        ([2.1, 3.0], "failure"),
        (None, "skipped"),
    ],
)
def test_a_limit_is_broken_only_where_the_whole_interval_is_beyond_it(
    run, gate, ci95, outcome
):
    slopes = run["configs"]["noop"]["slope_us_per_1k_blocks"]
    slope = {"schedule": {"value": sum(ci95 or [18.0]) / 2, "ci95": ci95}}
    new = changed(run, "noop", slope_us_per_1k_blocks=slopes | slope)
    limits = "[configs.noop]\nslope_us_per_1k_blocks = { schedule = 2.0 }\n"
    found = gate(run, new, limits)
    assert found.cases["noop", "slope_us_per_1k_blocks of schedule"] == outcome
    assert found.status == (outcome == "failure")
    strict = gate(run, new, limits + 'undecided = "fail"')
    assert strict.status == (outcome != "passed")
    assert ("+9.0 [?]" in found.text) == (ci95 is None)


def test_what_one_config_says_goes_before_the_default(run, gate):
    limits = """
        [default]
        p50_us = { schedule = 1.0, step = 1e9 }
        [configs.noop]
        p50_us = { schedule = 1e9 }
    """
    found = gate(run, run, limits)
    assert found.cases["noop", "p50_us of schedule"] == "passed"
    assert found.cases["noop", "p50_us of step"] == "passed"
    assert found.cases["mooncake_both", "p50_us of schedule"] == "failure"


def test_a_config_that_is_gone_is_seen_and_fails_where_it_has_limits(run, gate):
    new = copy.deepcopy(run)
    del new["configs"]["noop"]
    found = gate(run, new)
    assert (found.status, found.cases["noop", "verdict"]) == (0, "skipped")
    assert gate(run, new, "[configs.noop]").status == 1


def test_a_new_config_that_grows_is_seen(run, gate):
    old = copy.deepcopy(run)
    del old["configs"]["noop"]
    assert gate(old, run).cases["noop", "verdict"] == "passed"
    grows = changed(run, "noop", verdict="grows")
    assert gate(old, grows).cases["noop", "verdict"] == "skipped"


def test_a_metric_that_only_one_run_has_is_shown_and_cannot_be_judged(run, gate):
    new = copy.deepcopy(run)
    for entry in new["configs"].values():
        entry["verdict_of"]["per_second"] = "flat"
        slope = {"value": 0.1, "ci95": [0.0, 0.2]}
        entry["slope_us_per_1k_blocks"]["per_second"] = slope
    limits = """
        [default]
        slope_us_per_1k_blocks = { per_second = 1.0 }
        times_old = { per_second = 1.1 }
    """
    found = gate(run, new, limits)
    assert found.cases["noop", "slope_us_per_1k_blocks of per_second"] == "passed"
    assert found.cases["noop", "times_old of per_second"] == "skipped"
    back = gate(new, run, limits)
    assert back.cases["noop", "slope_us_per_1k_blocks of per_second"] == "skipped"
    assert "| `noop` | per_second |" in found.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: run["profile"]["load"].update(rate_rps=3.0), "load.rate_rps"),
        (lambda run: run["profile"].update(null_model=False), "null_model"),
        (lambda run: run.update(schema="kvtax.per_config/99"), "kvtax.per_config/99"),
        (lambda run: run.pop("configs"), "configs"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_with_the_reason(
    run, gate, spoil, message
):
    new = copy.deepcopy(run)
    spoil(new)
    found = gate(run, new)
    assert (found.status, found.text) == (2, "")
    assert message in found.error


def test_more_repeats_or_fewer_configs_are_no_other_profile(run, gate):
    new = copy.deepcopy(run)
    new["profile"] |= {"repeats": 9, "minutes": 60, "configs": ["plain"], "name": "a"}
    assert gate(run, new).status == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("[defaults]", "defaults"),
        ("[default]\nslope = 3", "slope"),
        ("[default]\np50_us = { shedule = 3.0 }", "shedule"),
        ("[configs.noop]\ntimes_old = { step = -1.0 }", "times_old"),
        ('[default]\nundecided = "ignore"', "undecided"),
        ("[default", "limits.toml"),
    ],
)
def test_a_misspelt_limit_is_refused_and_not_ignored(run, gate, limits, message):
    found = gate(run, run, limits)
    assert (found.status, found.text) == (2, "")
    assert message in found.error


@pytest.mark.parametrize("missing", ["nowhere.json", "."])
def test_a_missing_file_is_bad_input_and_no_broken_limit(tmp_path, capsys, missing):
    assert main(["compare", str(COMMITTED), str(tmp_path / missing)]) == 2
    assert "missing" in capsys.readouterr().err


@pytest.mark.slow
@given(
    slope=st.floats(-50, 50), more=st.floats(0, 50), half=st.floats(0.01, 20),
    at_most=st.floats(-20, 20),
)  # fmt: skip
def test_who_costs_more_never_fares_better(made_up, slope, more, half, at_most):
    document = msgspec.convert(made_up, PerConfig)
    limits = LimitsFile(Limits(slope_us_per_1k_blocks={"schedule": at_most}))
    order = []
    for value in (slope, slope + more):
        slope_us = Estimate(value, (value - half, value + half))
        document.configs["noop"].slope_us_per_1k_blocks["schedule"] = slope_us
        (check,) = (
            check
            for check in check_runs(document, document, limits)
            if check.config == "noop" and check.what.startswith("slope")
        )
        order.append(("kept", "undecided", "broken").index(check.outcome))
    assert order == sorted(order)


TIMES_OLD = "[default]\ntimes_old = { schedule = 1.5, overhead = 1.5, step = 1.5 }"


def test_a_slower_machine_is_no_change_and_is_named(run, gate):
    # Growth may also be told of what has no level.
    slope = {"value": 40.0, "ci95": [39.0, 41.0]}
    run["configs"]["noop"]["slope_us_per_1k_blocks"]["calls"] = slope
    run["configs"]["noop"]["verdict_of"]["calls"] = "grows"
    found = gate(run, on_a_machine(run, 2.5), TIMES_OLD)
    assert found.status == 0 and "failure" not in found.cases.values()
    assert "takes 2.50 times as long in NEW" in section(found.text, "Read this first")
    what = section(found.text, "What changed").partition("\n\nSlopes")[0]
    assert "**" not in what


def test_a_connector_that_got_slower_is_a_change_also_on_a_slower_machine(run, gate):
    slower = on_a_machine(on_a_machine(run, 2.5), 4.0, "mooncake_both")
    entry = slower["configs"]["mooncake_both"]
    base = slower["configs"]["plain"]
    for time, difference in entry["vs_plain"].items():
        p50 = entry[f"{time}_us"]["p50"] - base[f"{time}_us"]["p50"]
        difference |= {"value": p50, "ci95": [p50 - 1, p50 + 1]}
    found = gate(run, slower, TIMES_OLD)
    assert found.status == 1
    failed = {key for key, outcome in found.cases.items() if outcome == "failure"}
    assert {config for config, _ in failed} == {"mooncake_both"}
    assert ("mooncake_both", "times_old of step") in failed
    row = next(
        line
        for line in section(found.text, "What changed").splitlines()
        if line.startswith("| `mooncake_both` | step")
    )
    assert row.endswith("** |")


def test_times_of_another_machine_are_undecided_and_loudly_so(run, gate):
    new = copy.deepcopy(run)
    new["provenance"]["cpu_model"] = "another CPU"
    found = gate(run, new, TIMES_OLD + "\ntimes_floor = { step = 9.0 }")
    assert "No time is compared with OLD" in section(found.text, "Read this first")
    assert found.cases["mooncake_both", "times_old of step"] == "skipped"
    assert "another CPU" in section(found.text, "Undecided")
    assert found.cases["mooncake_both", "times_floor of step"] == "passed"
    strict = TIMES_OLD + '\nundecided = "fail"'
    assert gate(run, new, strict).status == 1


def test_levels_at_another_cache_are_not_compared(run, gate):
    new = copy.deepcopy(run)
    new["window"]["at_cache_blocks"] = 9_000
    found = gate(run, new, TIMES_OLD)
    assert found.cases["mooncake_both", "times_old of step"] == "skipped"
    assert "9,000 in NEW" in section(found.text, "Read this first")


def test_another_baseline_is_no_measure_of_speed(run, gate):
    new = copy.deepcopy(run)
    new["configs"]["another"] = new["configs"].pop("plain")
    found = gate(run, on_a_machine(new, 2.5))
    assert "share no baseline" in section(found.text, "Read this first")


def test_a_multiple_of_the_baseline_is_that_of_the_levels(run, gate):
    levels = [run["configs"][n]["step_us"] for n in ("mooncake_both", "plain")]
    times = levels[0]["p50"] / levels[1]["p50"]
    difference = levels[0]["p50"] - levels[1]["p50"]
    interval = [difference - 1, difference + 1]
    vs_plain = run["configs"]["mooncake_both"]["vs_plain"]
    vs_plain["step"] = {"value": difference, "ci95": interval}
    run["noise_floor"]["p50_us"]["step"]["floor"] = 1.0
    for bound, outcome in ((0.99 * times, "failure"), (1.01 * times, "passed")):
        limits = f"[configs.mooncake_both]\ntimes_baseline = {{ step = {bound} }}"
        found = gate(run, run, limits)
        assert found.cases["mooncake_both", "times_baseline of step"] == outcome


@pytest.mark.parametrize(
    ("at_most", "outcome"),
    [(90.0, "failure"), (97.0, "skipped"), (103.0, "skipped"), (110.0, "passed")],
)
def test_a_level_is_no_better_known_than_two_runs_of_one_config_agree(
    run, gate, at_most, outcome
):
    new = copy.deepcopy(run)
    differs = {"value": 6.0, "ci95": [0.0, 12.0]}
    new["noise_floor"]["p50_us"]["schedule"] = differs
    entry = new["configs"]["mooncake_both"]
    entry["schedule_us"]["p50"] = 100.0
    entry["vs_plain"]["schedule"] = {"value": 20.0, "ci95": [19.5, 20.5]}
    limits = f"[configs.mooncake_both]\np50_us = {{ schedule = {at_most} }}"
    found = gate(run, new, limits)
    assert found.cases["mooncake_both", "p50_us of schedule"] == outcome
