# SPDX-License-Identifier: Apache-2.0
"""The roofline's numbers, and the GPU sampler beside a pretended nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from fleet.analyze.gpu import gpu_use
from fleet.analyze.hardware import Gpu, HardwareError, Model, read_gpu
from fleet.analyze.roofline import decode_ms, main, prefill_ms
from fleet.experiment.gpu_sampler import HEADER, row

QWEN = Model.read("qwen3-coder-30b-a3b")
H20 = read_gpu("h20")
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


def test_time_by_hand_on_both_sides_of_the_roof() -> None:
    model = Model.of(DENSE)
    slow_maths = Gpu("x", peak_tflops=1e-12, bandwidth_tb_s=1, memory_gb=1, source="")
    ms, bound = prefill_ms(model, slow_maths, new=3)
    # Pairs of a query and a key: 1 + 2 + 3, each 4 x layers x heads x head size.
    flop = 2 * model.shared * 3 + 2 * 80 + 4 * 2 * 2 * 4 * 6
    assert (ms, bound) == (pytest.approx(flop * 1e3), "compute")
    slow_memory = Gpu("y", peak_tflops=1, bandwidth_tb_s=1e-12, memory_gb=1, source="")
    ms, bound = decode_ms(model, slow_memory, batch=5, context=7)
    nbytes = model.weight_bytes(5) + 5 * 8 * model.kv_bytes_per_token
    assert (ms, bound) == (pytest.approx(nbytes * 1e3), "memory")


def test_experts_read_grow_with_the_batch_up_to_all() -> None:
    read = [QWEN.weight_bytes(n) for n in (1, 8, 64, 100_000)]
    assert read == sorted(read)
    one = QWEN.shared + QWEN.experts_per_token * QWEN.expert + QWEN.head
    assert read[0] == pytest.approx(2 * one)
    every = QWEN.shared + QWEN.experts * QWEN.expert + QWEN.head
    assert read[-1] == pytest.approx(2 * every)


def test_cached_tokens_never_make_a_prompt_slower() -> None:
    for cached in (0, 10_000, 30_000):
        ms, _ = prefill_ms(QWEN, H20, 32_000 - cached, cached)
        assert ms <= prefill_ms(QWEN, H20, 32_000)[0]


def test_the_table_is_printed_and_unknown_names_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--gpu", "h200"]) == 0
    assert "4.8 TB/s" in capsys.readouterr().out
    assert main(["--gpu", "abacus"]) == 1
    assert "h20, h100" in capsys.readouterr().err
    with pytest.raises(HardwareError, match="no such model"):
        Model.read("no such model")


def sampler(out: Path, path: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fleet.experiment.gpu_sampler", "--out", str(out)]
    return subprocess.Popen(
        command, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
    )


def pretend(folder: Path, script: str) -> str:
    """A PATH on which nvidia-smi is `script`."""
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\n{script}\n")
    smi.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_without_nvidia_smi_nothing_is_written_and_it_says_so(tmp_path: Path) -> None:
    process = sampler(tmp_path / "gpu.csv", str(tmp_path))
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "no nvidia-smi" in said
    assert not (tmp_path / "gpu.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_samples_are_stamped_and_the_tool_ends_with_the_sampler(
    tmp_path: Path, end: signal.Signals
) -> None:
    rows = "0, 97, 40000, 412.5, 1980\n1, [N/A], 12, [N/A], 300"
    # It goes on without writing, so that no broken pipe ends it for us.
    path = pretend(tmp_path, f"echo '{rows}'; echo '{rows}'; exec sleep 600")
    out = tmp_path / "gpu.csv"
    began = time.monotonic_ns()
    process = sampler(out, path)
    deadline = time.monotonic() + 20
    while not out.exists() or out.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tool = int((tmp_path / "pid").read_text())
    process.send_signal(end)
    process.communicate(timeout=20)
    while _running(tool):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    text = out.read_text().splitlines()
    assert text[0] == HEADER
    first, second = text[1].split(","), text[2].split(",")
    assert began < int(first[0]) < time.monotonic_ns()
    assert first[1:] == ["0", "97", "40000", "412.5", "1980"]
    assert second[1:] == ["1", "", "12", "", "300"]


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_a_tool_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    process = sampler(tmp_path / "gpu.csv", pretend(tmp_path, "exit 9"))
    process.communicate(timeout=20)
    assert process.returncode == 1


def test_what_is_no_sample_is_no_row() -> None:
    assert row(1, "NVIDIA-SMI has failed, because\n") is None


def test_use_is_taken_while_requests_were_under_way(tmp_path: Path) -> None:
    rows = [
        row(at, f"0, {busy}, {memory}, 100, 1500")
        for at, busy, memory in ((5, 100, 90), (15, 40, 10), (25, 60, 30), (99, 0, 0))
    ]
    (tmp_path / "gpu.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    requests = pl.DataFrame({"sent_ns": [10, 20], "end_ns": [18, 30]})
    assert gpu_use(tmp_path, requests) == {
        "0": {
            "samples": 2,
            "utilization_percent": 50.0,
            "memory_used_mib_max": 30.0,
            "power_w": 100.0,
        }
    }
