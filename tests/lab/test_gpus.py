# SPDX-License-Identifier: Apache-2.0
"""What speaks against a GPU is said before a server is started on it."""

from __future__ import annotations

import pytest

from lab.serving import gpus
from lab.serving.gpus import gpu_problems, has_rdma
from tests.fake_gpu import H100, path_with_gpus


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The problems of a machine whose nvidia-smi prints these lines."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def found(*lines: str, servers: int = 1, workers: int = 1, script: str = "") -> str:
        monkeypatch.setenv("PATH", path_with_gpus(tmp_path, *lines, script=script))
        return "\n".join(gpu_problems(servers, workers))

    return found


def test_a_usual_gpu_has_no_problem(problems):
    assert problems(H100) == ""


def test_all_problems_of_a_gpu_are_said_at_once(problems):
    said = problems("0, Tesla V100, 16384, 9000, 470.82.01, 7.0")
    assert "9000 of 16384 MiB are in use" in said
    assert "no bfloat16" in said
    assert "driver 470.82.01 is too old for CUDA 12" in said


def test_each_server_needs_a_gpu_and_each_of_these_is_looked_at(problems):
    assert "2 server(s) need a GPU each, and 1" in problems(H100, servers=2)
    busy = H100.replace(" 4,", " 70000,")
    assert "in use" in problems(H100, busy, servers=2)
    assert problems(H100, busy) == ""


def test_a_server_of_several_workers_needs_a_gpu_for_each(problems):
    second = H100.replace("0, ", "1, ", 1)
    with_two = problems(H100, second, servers=1, workers=2)
    assert with_two == ""
    said = problems(H100, second, servers=2, workers=2)
    assert "2 server(s) need 2 GPUs each, and 2 can be seen" in said


def test_a_driver_that_does_not_run_is_said_in_its_own_words(problems):
    said = problems(script="echo could not talk to the driver; exit 9")
    assert "status 9" in said
    assert "could not talk to the driver" in said


def test_what_is_not_understood_is_not_taken_for_a_gpu(problems):
    assert "not understood" in problems("0, NVIDIA GB10, [N/A], [N/A], 580.1, 12.1")


@pytest.mark.parametrize("said", ["true", "echo No devices were found"])
def test_a_driver_without_a_gpu_is_no_gpu(problems, said):
    assert "this profile needs a GPU" in problems(script=said)


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    (said,) = gpu_problems(1)
    assert "no nvidia-smi" in said


def test_only_the_gpu_that_a_server_will_use_is_asked_about(problems, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert problems(script=f'[ "$3" = --id=3 ] && echo "{H100}"') == ""


@pytest.mark.parametrize(
    ("state", "up"), [("4: ACTIVE\n", True), ("1: DOWN\n", False), (None, False)]
)
def test_rdma_is_there_where_a_port_is_up(state, up, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "INFINIBAND", tmp_path)
    if state:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert has_rdma() is up
