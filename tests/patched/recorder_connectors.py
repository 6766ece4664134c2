# SPDX-License-Identifier: Apache-2.0
"""Connectors that know what they cost, to be compared with what the records say.

Loaded into the engine of the same process, by recorder_lab.py.
"""

import hashlib
import threading
import time
from types import FunctionType
from typing import ClassVar, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connectors.noop import NoopConnector

SPIN_US = 100


class Call(NamedTuple):
    """A call of a method, as the connector itself timed it."""

    side: str
    name: str
    us: float


# Calls in their order, and what the lab adds: ("scheduled", step_id) and the like.
LOG: list[tuple] = []
# What was saved: layer, shape of its KV cache, kind of metadata.
SAVED: set[tuple] = set()


class Plain(NoopConnector):
    def request_finished(self, request, block_ids):
        # As MultiConnector asks for it.
        return False, None

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        SAVED.add((layer_name, tuple(kv_layer.shape), type(attn_metadata).__name__))

    def of_its_own(self) -> None:
        """Not in vLLM's interface; build_connector_meta() calls it."""


def _busy(name: str, original: FunctionType) -> FunctionType:
    def method(self, *args, **kwargs):
        began_ns = time.perf_counter_ns()
        while time.perf_counter_ns() - began_ns < SPIN_US * 1e3:
            pass
        if name == "build_connector_meta":
            self.of_its_own()
        result = original(self, *args, **kwargs)
        us = (time.perf_counter_ns() - began_ns) / 1e3
        LOG.append(Call(self.role.name, name, us))
        return result

    return method


# All methods of an instance that anybody may call, whatever the release has.
METHODS = {
    name: getattr(Plain, name)
    for name in dir(Plain)
    if not name.startswith("_") and isinstance(getattr(Plain, name), FunctionType)
}
Busy = type("Busy", (Plain,), {name: _busy(name, METHODS[name]) for name in METHODS})


class Burner(NoopConnector):
    """Its methods do nothing, and a thread of its worker takes a core."""

    stopped = threading.Event()
    took_us: ClassVar[list[float]] = []

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            thread = threading.Thread(target=self._burn, name="burner", daemon=True)
            thread.start()

    def _burn(self) -> None:
        text = bytes(1 << 20)
        while not self.stopped.is_set():
            hashlib.sha256(text)  # without the GIL
        self.took_us.append(time.thread_time_ns() / 1e3)


# CPU time of the thread that Spawner starts in each step.
SPAWNED_US = 1_000


class Spawner(NoopConnector):
    """Each step starts a thread that works a moment and ends, and waits for none."""

    def start_load_kv(self, forward_context, **kwargs) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    @staticmethod
    def _work() -> None:
        while time.thread_time_ns() < SPAWNED_US * 1_000:
            pass
