# SPDX-License-Identifier: Apache-2.0
"""Rooflines, and comparisons that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fleet.tests.analyze.analyze_runs import Truth, analysed, write_run
from kvtax.cli import Exit, main

from kvtax_fleet.analyze.arm_runs import read_run
from kvtax_fleet.analyze.fleet_warnings import REMEDIES
from kvtax_fleet.analyze.refusals import found_warm, refusals
from kvtax_fleet.analyze.roofline import (
    Gpu,
    HardwareError,
    Model,
    forward_parts_us,
)

QWEN = Model.read("qwen3-coder-30b-a3b")
DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_weights_are_those_of_the_model_card() -> None:
    """Qwen3-Coder-30B-A3B: 30.5 billion weights, 3.3 billion of them active."""
    total = QWEN.shared + QWEN.experts * QWEN.expert + 2 * QWEN.head
    assert total == pytest.approx(30.5e9, rel=0.005)
    assert QWEN.active + 2 * QWEN.head == pytest.approx(3.3e9, rel=0.02)
    assert QWEN.kv_bytes_per_token == 98_304


def test_a_dense_model_by_hand() -> None:
    model = Model.of(DENSE)
    # Q and O: 8 x 8 each, K and V: 8 x 4 each; three matrices of 8 x 16.
    assert model.shared == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert model.active == model.shared
    assert model.weight_bytes(1) == model.weight_bytes(99) == 2 * (model.shared + 80)
    assert model.kv_bytes_per_token == 2 * 2 * 1 * 4 * 2


def test_the_parts_of_a_forward_by_hand() -> None:
    model, gpu = Model.of(DENSE), Gpu("x", 1, 2, "")
    weights, token, pair, context = forward_parts_us(model, gpu, batch=8).values()
    assert weights == pytest.approx(model.weight_bytes(8) / 2e6)
    assert token == pytest.approx(2 * model.shared / 1e6)
    # Each pair of a query and a key: 4 x layers x heads x head size.
    assert pair == pytest.approx(4 * 2 * 2 * 4 / 1e6)
    assert context == pytest.approx(model.kv_bytes_per_token / 2e6)


def test_experts_read_grow_with_the_batch_up_to_all() -> None:
    read = [QWEN.weight_bytes(n) for n in (1, 8, 64, 100_000)]
    assert read == sorted(read)
    one = QWEN.shared + QWEN.experts_per_token * QWEN.expert + QWEN.head
    assert read[0] == pytest.approx(2 * one)
    every = QWEN.shared + QWEN.experts * QWEN.expert + QWEN.head
    assert read[-1] == pytest.approx(2 * every)


def test_the_roofline_is_printed_and_unknown_names_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fleet", "roofline", "--gpu", "h200"]) == 0
    assert "4.8 TB/s" in capsys.readouterr().out
    assert main(["fleet", "roofline", "--gpu", "abacus"]) == Exit.BAD_INPUT
    assert "h20, h100" in capsys.readouterr().err
    with pytest.raises(HardwareError, match="no such model"):
        Model.read("no such model")


def pair(folder: Path, **worse) -> list:
    """Two arms; `worse` is what is wrong with the second one."""
    base = {"policy": "linear", "concurrency": 2, "baseline": "a"}
    arms = [Truth("a", **base), Truth("b", **(base | {"policy": "lmetric"} | worse))]
    return read_run(write_run(folder, arms))


def test_arms_that_differ_in_their_policy_alone_are_compared(tmp_path):
    assert refusals(pair(tmp_path), "b", "a") == []


@pytest.mark.parametrize(
    ("worse", "what"),
    [
        ({"fresh": False}, "cold caches"),
        ({"status": "failed"}, "the run failed"),
        ({"saturated": "cores"}, "did not keep up"),
        ({"valid": False}, "sent late"),
        ({"fails": 1}, "did not end ok differ"),
        ({"sessions": 39}, "requests differ"),
        ({"repeats": 1}, "repeats are not the same"),
        ({"concurrency": 8}, "concurrency differs"),
    ],
)
def test_a_comparison_is_refused_with_the_reason(worse, what, tmp_path):
    runs = pair(tmp_path, **worse)
    for arm, baseline in (("a", "b"), ("b", "a")):
        assert any(what in reason for reason in refusals(runs, arm, baseline))


def test_an_arm_that_did_not_run_is_not_compared(tmp_path):
    assert refusals(pair(tmp_path), "c", "a") == ["there is no run of c"]


def test_a_warm_instance_shows_in_the_records_alone(tmp_path):
    """Counters can be reset; what a request found cached was there."""
    requests = pair(tmp_path)[0].requests
    assert found_warm(requests) is None
    first = min(requests, key=lambda one: one.sent_ns)
    first.cached_tokens = 512
    assert f"{first.instance} found 512 tokens" in found_warm(requests)
    first.prefill_instance = "another"
    assert found_warm(requests) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("failures", {"fails": 5}),
        ("apc_disagrees", {"hidden_hits": 200_000}),
        ("not_fresh", {"fresh": False}),
        ("held", {"held": 3}),
        ("lag", {"valid": False}),
        ("machine_saturated", {"saturated": "cores busy"}),
        ("few_sessions", {"sessions": 10}),
        ("tokens_disagree", {"short_answers": 5}),
        ("top_sessions", {"giants": 5}),
        ("arm_failed", {"status": "failed"}),
        ("drain", {"steady_share": 0.5}),
        ("record_incomplete", {"misplaced": 3}),
    ],
)
def test_a_doubt_is_told_and_only_that(tmp_path: Path, kind: str, fault: dict) -> None:
    analysis, text = analysed(tmp_path, Truth("linear", repeats=1, **fault))
    told = analysis.document["warnings"]
    assert {one["kind"] for one in told} == {kind}
    assert f"**{kind.replace('_', ' ')}**" in text
    assert f"  - **What to do:** {REMEDIES[kind]}" in text


@pytest.mark.slow
def test_lookups_that_were_counted_again_are_named_as_the_cause(
    tmp_path: Path,
) -> None:
    """A request that waits for KV blocks is looked up again in every step."""
    again = Truth("linear", repeats=1, hidden_hits=200_000, hidden_queries=250_000)
    _, text = analysed(tmp_path / "again", again)
    assert "looked requests up more than once" in text
    _, text = analysed(tmp_path / "hits", replace(again, hidden_queries=0))
    assert "looked requests up more than once" not in text
