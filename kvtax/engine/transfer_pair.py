# SPDX-License-Identifier: Apache-2.0
"""Two bare Mooncake engines, a process each: is a write there when it returns?

The receiver's memory is a memory file that the writer maps too, so that the writer sees
what has arrived without asking. The file has no name and goes with the two processes.

`python -m kvtax.engine.transfer_pair ROUNDS` is the writer and starts the receiver.
Among what the engines log it prints one line of JSON, an TransferOutcome.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

# What vLLM's connector hands over in one call for 1,024 tokens in 8 layers: per layer a
# run of 64 adjacent blocks of 64 KiB (16 tokens, 8 KV heads of 128, K and V, bf16).
RUNS, RUN_BYTES = 8, 4 * 2**20
WRITE_BYTES = RUNS * RUN_BYTES
ARRIVAL_LIMIT_MS = 2000.0


class TransferOutcome(msgspec.Struct):
    """`late_ms`: per round, from the write's return to its last byte; 0 is honest.

    Bytes that did not arrive within ARRIVAL_LIMIT_MS end the rounds early.
    """

    package: str
    version: str
    late_ms: list[float]

    @property
    def incomplete_ms(self) -> list[float]:
        """The rounds that were incomplete when the write returned."""
        return [late_ms for late_ms in self.late_ms if late_ms > 0]


def write(rounds: int) -> TransferOutcome:
    """Start the receiver, write to it `rounds` times, look each time.

    Raises RuntimeError if an engine refuses, ModuleNotFoundError without Mooncake.
    """
    file = os.memfd_create("kvtax-transfer")
    os.truncate(file, WRITE_BYTES)
    command = [sys.executable, "-m", "kvtax.engine.transfer_pair", "receive", str(file)]
    with subprocess.Popen(
        command, pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as receiver:
        try:
            late_ms = _late_ms(rounds, _map(file), receiver)
        finally:
            receiver.kill()
    package = importlib.metadata.packages_distributions()["mooncake"][0]
    return TransferOutcome(package, importlib.metadata.version(package), late_ms)


def _late_ms(
    rounds: int, target: np.ndarray, receiver: subprocess.Popen
) -> list[float]:
    source = np.empty_like(target)
    # The runs change places, as blocks do between two instances.
    expected = source[::-1]
    engine = _engine_with(source)
    if receiver.stdout is None:
        raise RuntimeError("the receiver's output is not a pipe")
    if not (ready := receiver.stdout.readline()):
        raise RuntimeError("the receiver's engine did not start")
    port, target_address = map(int, ready.split())
    lists = (
        [run.ctypes.data for run in expected],
        [target_address + run * RUN_BYTES for run in range(RUNS)],
        [RUN_BYTES] * RUNS,
    )
    late_ms: list[float] = []
    while len(late_ms) < rounds and max(late_ms, default=0) < ARRIVAL_LIMIT_MS:
        # Other bytes than the round before in every run.
        source[:] = (np.arange(1, 1 + RUNS) + len(late_ms))[:, None] % 256
        status = engine.batch_transfer_sync_write(f"127.0.0.1:{port}", *lists)
        returned_ns = time.perf_counter_ns()
        if status != 0:
            raise RuntimeError(f"batch_transfer_sync_write returned {status}")
        late_ms.append(_last_byte_ms(target, expected, returned_ns))
    return late_ms


def _last_byte_ms(target: np.ndarray, expected: np.ndarray, since_ns: int) -> float:
    """When the last byte was there; 0 if it was at the first look."""
    late_ms = 0.0
    while not _arrived(target, expected) and late_ms < ARRIVAL_LIMIT_MS:
        time.sleep(1e-4)  # leave the receiver the core
        late_ms = (time.perf_counter_ns() - since_ns) / 1e6
    return late_ms


def _arrived(target: np.ndarray, expected: np.ndarray) -> bool:
    # The ends first: looking at everything takes as long as the last byte is late.
    ends = np.array_equal(target[:, -1], expected[:, -1])
    return ends and np.array_equal(target, expected)


def receive(file: int) -> None:
    """Offer the memory file to writers until stdin is closed."""
    target = _map(file)
    engine = _engine_with(target)
    print(engine.get_rpc_port(), target.ctypes.data, flush=True)
    sys.stdin.read()


def _map(file: int) -> np.ndarray:
    """Map the memory file as an array of uint8, [RUNS, RUN_BYTES]."""
    memory = mmap.mmap(file, WRITE_BYTES)
    return np.frombuffer(memory, np.uint8).reshape(RUNS, RUN_BYTES)


def _load_cuda_runtime() -> None:
    """For Mooncake's build for GPUs, which does not look where pip installs it.

    In vLLM, PyTorch has loaded it already.
    """
    for folder in sys.path:
        for library in Path(folder, "nvidia/cuda_runtime/lib").glob("libcudart.so.*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _engine_with(memory: np.ndarray):
    """Set up a TransferEngine as vLLM's MooncakeConnectorWorker does, over TCP."""
    _load_cuda_runtime()
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if status := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"TransferEngine.initialize returned {status}")
    if status := engine.batch_register_memory([memory.ctypes.data], [memory.nbytes]):
        raise RuntimeError(f"batch_register_memory returned {status}")
    return engine


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        print(msgspec.json.encode(write(int(sys.argv[1]))).decode(), flush=True)
