# SPDX-License-Identifier: Apache-2.0
"""A roofline is counted by hand, and is a table that a profile reads."""

from __future__ import annotations

import tomllib

import msgspec
import pytest
from kvtax.cli import Exit, main
from kvtax.engine.null_model import Forward

from kvtax_fleet.analyze.roofline import Gpu, Model, forward_us

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


def test_weights_and_kv_are_those_of_the_model_card() -> None:
    """Qwen3-Coder-30B-A3B: 30.5 billion weights, 3.3 billion of them active."""
    total = QWEN.shared + QWEN.experts * QWEN.expert + 2 * QWEN.head
    assert total == pytest.approx(30.5e9, rel=0.005)
    assert QWEN.active + 2 * QWEN.head == pytest.approx(3.3e9, rel=0.02)
    assert QWEN.kv_bytes_per_token == 98_304


def test_a_dense_model_by_hand() -> None:
    model = Model.of(DENSE)
    # Q and O: 8 x 8 each, K and V: 8 x 4 each; three matrices of 8 x 16.
    assert model.active == model.shared == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert model.weight_bytes(1) == model.weight_bytes(99) == 2 * (model.shared + 80)
    # At half of 1 TFLOP/s and of 2 TB/s.
    assert forward_us(model, Gpu(1, 2, ""), 0.5) == pytest.approx(
        {
            "forward_us": model.weight_bytes(8) / 1e6,
            "us_per_token": 2 * model.shared / 0.5e6,
            "us_per_context_token": 4 * 2 * 2 * 4 / 0.5e6,
            "us_per_kv_token": 2 * 2 * 1 * 4 * 2 / 1e6,
        }
    )


def test_experts_read_grow_with_the_batch_up_to_all() -> None:
    read = [QWEN.weight_bytes(n) for n in (1, 8, 64, 100_000)]
    assert read == sorted(read)
    few = QWEN.shared + QWEN.experts_per_token * QWEN.expert + QWEN.head
    every = QWEN.shared + QWEN.experts * QWEN.expert + QWEN.head
    assert [read[0], read[-1]] == pytest.approx([2 * few, 2 * every])


def test_the_command_prints_what_a_profile_reads(capsys) -> None:
    assert main(["fleet", "roofline", "--gpu", "h200", "--share", "0.6"]) == 0
    printed = capsys.readouterr().out
    forward = msgspec.convert(tomllib.loads(printed)["forward"], Forward)
    assert forward.us_per_token == pytest.approx(
        2 * QWEN.active / (0.6 * 989e6), rel=1e-3
    )
    assert "60% of 989 TFLOP/s" in printed


@pytest.mark.parametrize(
    ("option", "known"), [("--gpu", "h20, h100"), ("--model", "No such file")]
)
def test_unknown_names_are_refused(option, known, capsys) -> None:
    assert main(["fleet", "roofline", option, "abacus"]) == Exit.BAD_INPUT
    assert known in capsys.readouterr().err
