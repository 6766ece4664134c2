# SPDX-License-Identifier: Apache-2.0
"""Dynamo's KVBM connector on a machine without a GPU: nothing is copied.

CUDA's driver is kvbm_without_gpu.c, which `cc` compiles when this is imported; the
caches look like a GPU's. Scheduler and worker are KVBM's own, with its block pools,
threads and messages. Load it with `kv_connector: DynamoConnector` and
`kv_connector_module_path: connectors.kvbm_without_gpu`.
"""

import ctypes
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1 import cpu_streams


def load_driver() -> None:
    """Compile the driver, and load it under the name that CUDA's has."""
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(prefix="kvtax-driver-") as folder:
        library = Path(folder, "libcuda.so.1")
        command = ["cc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        # Global, so that KVBM's calls of NIXL find ours first.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


load_driver()

from kvbm.vllm_integration import connector_worker  # noqa: E402
from kvbm.vllm_integration.connector import (  # noqa: E402
    DynamoConnector as OnGpu,
)


class Event(cpu_streams.Event):
    """Event with the handle that KVBM passes on."""

    cuda_event = 0


class GpuTensor:
    """A tensor that says that it is on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = SimpleNamespace(type="cuda", index=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class DynamoConnector(OnGpu):
    """KVBM's connector, whose worker registers caches as a GPU's.

    The null model's layers share the cache of the first; each has an event.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(
            {name: GpuTensor(cache) for name, cache in kv_caches.items()}
        )
        self._worker.events = defaultdict(Event, self._worker.events)


connector_worker.torch = SimpleNamespace(
    cuda=SimpleNamespace(Event=Event, current_stream=cpu_streams.Stream)
)
