# SPDX-License-Identifier: Apache-2.0
"""A connector whose costs no axis shows that is moved alone, or by means alone."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import threading
import time

from vllm.v1.core.block_pool import BlockPool

from connectors.noop import NoopConnector

# Busy for 0.1 us per cached block, which the parent writes into a file; then asleep.
HELPER = """
import mmap, os, struct, sys, time
file, parent = open(sys.argv[1], "r+b"), os.getppid()
pool = mmap.mmap(file.fileno(), 8)
while os.getppid() == parent:
    until = time.perf_counter() + 1e-7 * struct.unpack("q", pool[:8])[0]
    while time.perf_counter() < until:
        pass
    time.sleep(0.002)
"""
pools: list[BlockPool] = []
reset_s = [time.monotonic()]
_init, _reset = BlockPool.__init__, BlockPool.reset_prefix_cache


def _noted(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    pools.append(self)


def _noted_reset(self, *args, **kwargs):
    done = _reset(self, *args, **kwargs)
    reset_s[:] = [time.monotonic()] if done else reset_s
    return done


BlockPool.__init__, BlockPool.reset_prefix_cache = _noted, _noted_reset


def cached() -> int:
    return len(pools[-1].cached_block_hash_to_block) if pools else 0


def take(us: float) -> None:
    until_ns = time.thread_time_ns() + us * 1e3
    while time.thread_time_ns() < until_ns:
        pass


class Hidden(NoopConnector):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._calls = 0
        if "SCHEDULER" in str(args[1] if len(args) > 1 else kwargs["role"]):
            # As the recorder calls its own.
            name = "records-engine_step"
            threading.Thread(target=self._write, name=name, daemon=True).start()
            self._start_helper()

    def _start_helper(self) -> None:
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._file.write(bytes(8))
        self._file.flush()
        self._blocks = mmap.mmap(self._file.fileno(), 8)
        subprocess.Popen([sys.executable, "-S", "-c", HELPER, self._file.name])

    def _write(self) -> None:
        while True:
            time.sleep(0.003)
            take(0.03 * cached())

    def build_connector_meta(self, scheduler_output):
        """40 us per 1,000 cached blocks if 12 requests or more are scheduled."""
        self._blocks[:8] = cached().to_bytes(8, "little")
        if len(scheduler_output.num_scheduled_tokens) >= 12:
            take(0.04 * cached())
        return super().build_connector_meta(scheduler_output)

    def get_finished(self, finished_req_ids):
        """6 ms in one step of 200 with more than half of the blocks cached."""
        self._calls += 1
        if self._calls % 200 == 0 and cached() > 9_000:
            take(6_000)
        return None, None


class Aging(NoopConnector):
    def start_load_kv(self, forward_context, **kwargs) -> None:
        """400 us per second since the last reset of the prefix cache."""
        take(400 * (time.monotonic() - reset_s[0]))
