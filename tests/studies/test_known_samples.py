# SPDX-License-Identifier: Apache-2.0
"""Tables of studies, made of samples whose truth is known."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtax_fleet.launch.instance_settings import read_instance_settings
from kvtax_fleet.paths import CONFIGS, FLEET
from kvtax_fleet.policies.decision import HEAVY_ABOVE_TOKENS, HUGE_ABOVE_TOKENS
from kvtax_fleet.trace import read_trace

from kvtax.axes.cell import Measured
from kvtax.records import RecordsError
from kvtax.stats import resampling
from studies.observatory import __main__ as observatory
from studies.questions.__main__ import answers_of, compared, read_result
from studies.reference_study import forward, sample
from studies.reference_study.__main__ import (
    AGREES_WITHIN,
    CAUSES,
    Row,
    _analysis,
    _framework,
    agrees,
    sections_now,
)
from studies.reference_study.population import sampled_requests


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """No figure here is near the end of an interval."""
    monkeypatch.setattr(resampling, "ROUND_REPLICATES", 100)


def test_arms_are_compared_with_the_first_and_as_the_expectations_say():
    """Half of an arm's heavy prompts move where it offloads, and all metrics count."""
    rows = [
        {
            "arm": f"{arm}@{load}",
            "repeat": repeat,
            "id": f"{session}",
            "session": f"s{session}",
            "status": "ok",
            "window": "steady",
            "decided_class": "HEAVY" if session % 4 else "WARM",
            "prefill_instance": "i7" if arm == "dynamo" and session % 4 == 1 else None,
            "ttft_ms": 10.0 * factor,
            "tpot_ms": 1.0 * factor,
            "e2e_ms": 100.0 * factor + session,
        }
        for load in (2, 6)
        for arm, factor in (("linear", 1), ("dynamo", 2), ("dynamo_agentic", 3))
        for repeat in range(3)
        for session in range(40)
    ]
    judged = compared(pl.DataFrame(rows, infer_schema_length=None))
    pairs = [
        ("dynamo", "linear"),
        ("dynamo_agentic", "linear"),
        ("dynamo_agentic", "dynamo"),
    ]
    assert [(row.load, row.arm, row.against) for row in judged] == [
        (load, *pair) for load in (2, 6) for pair in pairs
    ]
    assert [row.ttft.value for row in judged[:3]] == [100, 200, 50]
    assert [row.tpot.value for row in judged[:3]] == [100, 200, 50]
    assert [row.moved_percent for row in judged[:3]] == [33.3, None, None]


def test_the_committed_answers_are_read_and_another_file_is_not_taken_for_them(
    tmp_path: Path,
):
    assert answers_of(read_result())
    other = tmp_path / "other.json.gz"
    for text in ("", "[]", '{"provenance": {}, "a": 1}'):
        other.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(RecordsError, match="no result of"):
            read_result(other)


figures = st.floats(0.01, 1e6)


@given(figures, figures)
def test_which_of_two_figures_is_the_studys_makes_no_difference(value, other):
    assert agrees(value, other) == agrees(other, value) == agrees(-value, -other)
    assert not agrees(value, -other)


@given(figures, st.floats(1.001, 10))
def test_figures_agree_up_to_the_stated_factor(study, factor):
    other = study * factor
    assert agrees(study, other) == (other / study <= AGREES_WITHIN)


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row("a", 2, 2.2), "agrees"),
        (Row("a", 2, 3), "differs"),
        (Row("a", 2, None), "not comparable"),
        (Row("a", None, 3), "not comparable"),
        (Row("moves", 0, 0), "agrees"),
        (Row("a", -0.8, 0.2), "differs"),
        (Row("a", -0.8, 0.2, near=1), "agrees"),
        (Row("a", 0, 1.1, near=1), "differs"),
    ],
)
def test_a_row_is_judged_where_both_have_a_figure(row, verdict):
    assert row.verdict == verdict


def test_the_frameworks_part_is_split_by_purpose_and_has_no_thread_of_the_engine():
    rows = {row.what.partition(",")[0]: row for row in _framework()}
    assert {"metadata", "KV buffers", "what has arrived"} < rows.keys()
    assert all(row.here >= 0 for row in rows.values() if row.here is not None)


def test_no_row_of_the_page_lacks_a_verdict_or_what_explains_it():
    rows = [row for section in sections_now().values() for row in section]
    assert len(rows) > 100
    assert [row.what for row in rows if not row.verdict] == []
    unexplained = [row for row in rows if row.verdict != "agrees" and not row.note]
    assert unexplained == []
    assert {row.basis for row in rows} == {"input", "prediction", "-"}


def test_every_cause_is_of_a_row():
    sections = sections_now()
    for cause in CAUSES:
        names = [row.what for row in sections[cause.section]]
        assert any(re.fullmatch(cause.figures, name) for name in names), cause


def test_what_its_authors_withdrew_agrees_with_nothing():
    row = Row("a", 2, 2, withdrawn="obsolete")
    assert row.verdict == "theirs withdrawn"


def test_a_run_of_another_experiment_is_refused_by_name(tmp_path):
    (tmp_path / "analysis.json").write_text('{"arms": {"linear@4": {}}}')
    with pytest.raises(RecordsError, match="a run of fleet/configs"):
        _analysis(tmp_path, "study_sample", ["linear@1"])


def test_the_profile_is_the_fit_and_holds_at_every_measured_length():
    assert forward.PROFILE.forward is not None
    fitted, committed = forward.fit(), forward.PROFILE.forward
    assert fitted[1:] == (
        committed.forward_us,
        committed.us_per_token,
        committed.us_per_context_token,
    )
    assert fitted.path_us == forward.HOST.requests.to_engine.base_us
    beside = forward.rows()
    assert sum(not row.fitted for row in beside) == 4
    assert [row.what for row in beside if abs(row.off) > 0.15] == []


def test_the_replays_own_step_is_the_measured_profile_and_74_ms():
    replay = read_instance_settings(CONFIGS / "profiles" / "h20-replay-r.toml")
    measured = forward.PROFILE.forward
    assert replay.forward == msgspec.structs.replace(measured, launch_us=74_000)


def test_sources_that_take_a_tenth_more_at_all_levels_are_a_ratio_of_1_1():
    passes = np.array([[100.0, 200.0, 400.0]]) * 2.0 ** np.arange(6)[:, None]
    build, sources = (
        Measured({"cache": {"step_us": us.tolist()}}) for us in (passes, 1.1 * passes)
    )
    quotient = observatory.ratio(sources, build, "cache")
    assert (quotient.value, *quotient.ci95) == pytest.approx((1.1, 1.1, 1.1))


# reference_study: the twin of its sample has its figures.


def test_the_committed_trace_is_the_sample():
    trace = FLEET / "traces" / "study_sample.jsonl.xz"
    assert list(read_trace(trace)) == sampled_requests()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 0, 1])
def test_every_figure_is_within_its_tolerance(seed):
    """Of other seeds the first 200 are another draw of the same population."""
    sampled = sample.figures(sampled_requests(seed))
    held = [figure for figure in sampled if figure.tolerance is not None]
    assert len(held) == len(sampled) - 1
    off = {
        (figure.population, figure.name): figure.here
        for figure in held
        if abs(figure.here - figure.study) > figure.tolerance
        and (seed == 42 or figure.population != sample.FIRST)
    }
    assert off == {}


@pytest.mark.parametrize("seed", [42, 0, 1])
def test_each_fifth_has_the_same_classes_but_for_chance_and_growth(seed):
    new = sample.new_tokens(sampled_requests(seed))
    for first in range(0, 1_000, 200):
        part = new[first : first + 200]
        huge = sum(tokens > HUGE_ABOVE_TOKENS for tokens in part) / 200
        heavy = sum(tokens > HEAVY_ABOVE_TOKENS for tokens in part) / 200
        assert 0.1 < huge < 0.22
        assert 0.35 < heavy < 0.55
