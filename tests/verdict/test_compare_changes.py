# SPDX-License-Identifier: Apache-2.0
"""What counts as a change from one run to another, and what is the machine's doing."""

from __future__ import annotations

import copy

import pytest

from tests.verdict.conftest import on_a_machine, section

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
    ("floor", "half", "more", "changed"),
    [
        (1.0, 0.5, 5.0, True),
        (6.0, 0.5, 5.0, False),  # the A/A pair differs by more
        (1.0, 9.0, 5.0, False),  # the intervals overlap
    ],
)
def test_a_change_is_beyond_the_intervals_and_the_noise_floors(
    run, gate, floor, half, more, changed
):
    for document in (old := copy.deepcopy(run), new := copy.deepcopy(run)):
        noise = document["noise_floor"]
        noise["slope_us_per_1k_blocks"]["schedule"]["floor"] = floor
        noise["p50_us"]["schedule"]["floor"] = floor
        entry, base = (document["configs"][n] for n in ("mooncake_both", "plain"))
        value, level = (more, 100.0 + more) if document is new else (0.0, 100.0)
        stated = {"value": value, "ci95": [value - half, value + half]}
        entry["slope_us_per_1k_blocks"]["schedule"] = stated
        base["schedule_us"]["p50"] = 50.0
        entry["schedule_us"]["p50"] = level
        added = level - 50.0
        interval = [added - half, added + half]
        entry["vs_plain"]["schedule"] = {"value": added, "ci95": interval}
    (row,) = (
        line.split(" | ")
        for line in gate(old, new).text.splitlines()
        if line.startswith("| `mooncake_both` | schedule |")
    )
    assert [cell.strip(" |").startswith("**") for cell in (row[5], row[8])] == [
        changed,
        changed,
    ]


@pytest.mark.parametrize(
    ("at_most", "outcome"),
    [(90.0, "failure"), (97.0, "skipped"), (103.0, "skipped"), (110.0, "passed")],
)
def test_a_level_is_no_better_known_than_two_runs_of_one_config_agree(
    run, gate, at_most, outcome
):
    new = copy.deepcopy(run)
    new["noise_floor"]["p50_us"]["schedule"]["floor"] = 6.0
    entry = new["configs"]["mooncake_both"]
    entry["schedule_us"]["p50"] = 100.0
    entry["vs_plain"]["schedule"] = {"value": 20.0, "ci95": [19.5, 20.5]}
    limits = f"[configs.mooncake_both]\np50_us = {{ schedule = {at_most} }}"
    found = gate(run, new, limits)
    assert found.cases["mooncake_both", "p50_us of schedule"] == outcome
