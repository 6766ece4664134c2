# SPDX-License-Identifier: Apache-2.0
"""An engine core that is held at one level of one axis after the other.

Run by kvtax.axes.cell on a patched vLLM of some release, whose step records tell
what the steps took. The worker says which steps belong to which hold, and takes the CPU
time of all that is beside the engine's thread.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import psutil

from kvtax.axes import GIVEN, Held
from kvtax.engine.engine_process import serve
from kvtax.engine.null_engine import BLOCK_SIZE, NullEngine

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

HELD_BATCH, HELD_TOKENS = 8, 4 * BLOCK_SIZE
WIDE_BATCH = 32
FILLING_TOKENS = 256 * BLOCK_SIZE
FRAGMENTED_BLOCKS = 64
# Cached prompt of which arriving prompts repeat a part, the highest level of `hits`.
HIT_TOKENS = 8_064
# More than 25 of the longest prompts take: none gets the blocks of one before.
PROMPT_POOL_BLOCKS = 16_384
# At 131,072 tokens of context each, as many as the cache has room for.
LONG_BATCH = 4
# The first steps at a level run with the processor's caches of the one before.
COLD_STEPS = 5
# A batch that is prefilled in chunks decodes as a whole only after so many steps.
PREFILL_STEPS = 200
# A connector may hold what has ended until it has saved it.
FINISH_DEADLINE_S = 120.0
HELD_PAUSE_S = 0.002
# Blocks of requests that have all ended are free by then.
FREED_DEADLINE_S, FREED_PAUSE_S = 10.0, 0.1
# A prompt repeats so many token ids, which are below the null model's 1,024.
PROMPT_IDS, VOCABULARY = 8, 1_000
# Seconds for which the engine without requests is measured.
IDLE_S = 2.0
# Steps between two looks at what the processes have written.
WATCHED_STEPS = 4


# Package of vLLM whose threads write the records.
RECORDER = "vllm.kvtax_probe"


class ConnectorError(Exception):
    """The connector does what no engine can be measured with; the message says what."""


class Scheduler(Protocol):
    """Attributes of vLLM's scheduler that its interface does not declare."""

    kv_cache_manager: KVCacheManager
    connector: KVConnectorBase_V1 | None
    requests: dict[str, Request]


class SteppedEngine(NullEngine):
    """An engine that can be taken to a level of each axis, and counts its steps."""

    def __init__(
        self,
        model: Path,
        kv_transfer: dict[str, Any] | None,
        sizes: dict[str, Any],
        most_bytes: int,
        most_s: float,
    ) -> None:
        super().__init__(model, kv_transfer, **sizes)
        self._steps = 0
        # Prompts of another run are others: a connector may have stored those.
        self._prompts = count(int.from_bytes(os.urandom(6)))
        self._scheduler = cast(Scheduler, self.core.scheduler)
        self._reset_s = self._began_s = time.monotonic()
        self._most_s = most_s
        self._most_bytes = most_bytes
        self._of_vllm = threads_of_vllm()
        self._helpers = helpers()
        self._written_before = written_bytes(self._helpers)

    def cache(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of cached blocks; reset the cache before a lower number."""
        return self._cached(levels, HELD_BATCH, steps)

    def cache_at_32(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of cached blocks, with more requests that decode."""
        return self._cached(levels, WIDE_BATCH, steps)

    def _cached(self, levels: list[int], batch: int, steps: int) -> list[Held]:
        held = []
        for blocks in levels:
            if self._cached_blocks > blocks:
                self._forget()
            self._fill(blocks)
            held.append(self._decode(batch, HELD_TOKENS, steps))
        return held

    def running(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of requests that decode."""
        return [self._anew(batch, HELD_TOKENS, steps) for batch in levels]

    def context(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of tokens that a decoding request attends to."""
        return [self._anew(LONG_BATCH, tokens, steps) for tokens in levels]

    def arrivals(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of requests that arrive, and end, in every step."""
        held = []
        for each in levels:
            self._forget()
            held.append(self._arriving(each, HELD_TOKENS, steps))
        return held

    def prompt(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each length of the prompt of a request that arrives in every step.

        The pool is small and full, so as many blocks are cached at all levels; and in
        order, so a prompt's blocks are neighbours.
        """
        self._forget()
        queue = self._pool.free_block_queue
        self._scatter(queue.num_free_blocks)
        kept_out = queue.popleft_n(queue.num_free_blocks - PROMPT_POOL_BLOCKS)
        self._fill(PROMPT_POOL_BLOCKS - FILLING_TOKENS // BLOCK_SIZE)
        held = []
        for tokens in levels:
            self._scatter(PROMPT_POOL_BLOCKS)
            held.append(self._arriving(1, tokens, steps))
        queue.append_n(kept_out)
        return held

    def hits(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of cached tokens with which an arriving prompt begins.

        A new part of HELD_TOKENS follows them. One request arrives in every step.
        """
        self._forget()
        cached = self._prompt(HIT_TOKENS)
        self.add(cached, 1)
        self._finish()

        def arriving(tokens: int) -> list[int]:
            return cached[:tokens] + self._prompt(HELD_TOKENS)

        return [
            self._hold(HELD_BATCH, HELD_TOKENS, steps, 1, partial(arriving, tokens))
            for tokens in levels
        ]

    def fragments(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of contiguous runs that an arriving request's blocks form.

        One request of FRAGMENTED_BLOCKS arrives, and ends, in every step.
        """
        held = []
        for fragments in levels:
            self._forget()
            self._scatter(FRAGMENTED_BLOCKS // fragments)
            held.append(self._arriving(1, FRAGMENTED_BLOCKS * BLOCK_SIZE, steps))
        return held

    @property
    def has_tier(self) -> bool:
        """Return whether the connector keeps KV of its own, and can forget it."""
        connector = self._scheduler.connector
        return connector is not None and "reset_cache" in vars(type(connector))

    def tier(self, levels: list[int], steps: int) -> list[Held]:
        """Hold each number of blocks that were computed and left to the connector."""
        held: list[Held] = []
        stored = levels[0] + 1
        for blocks in levels:
            if stored > blocks:
                self._empty_tier()
                stored = 0
            while stored < blocks:
                self.add(self._prompt(FILLING_TOKENS), 1)
                self._finish()
                stored += FILLING_TOKENS // BLOCK_SIZE
            held.append(self._anew(HELD_BATCH, HELD_TOKENS, steps))
        return held

    def _empty_tier(self) -> None:
        self._forget()
        connector = self._scheduler.connector
        if connector is None:
            raise RuntimeError("there is no connector to have a tier")
        if connector.reset_cache() is False:
            raise ConnectorError("the connector's reset_cache() did not empty its tier")

    @property
    def _cached_blocks(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    @property
    def _pool(self) -> BlockPool:
        return self._scheduler.kv_cache_manager.block_pool

    def _fill(self, blocks: int) -> None:
        """Compute prompts until at least so many blocks are cached."""
        while self._cached_blocks < blocks:
            self.add(self._prompt(FILLING_TOKENS), 1)
            self._finish()

    def _anew(self, batch: int, tokens: int, steps: int) -> Held:
        self._forget()
        return self._decode(batch, tokens, steps)

    def _decode(self, batch: int, tokens: int, steps: int) -> Held:
        """Hold `steps` steps in which all of `batch` requests decode."""
        return self._hold(batch, tokens, steps, 0, list)

    def _arriving(self, each: int, tokens: int, steps: int) -> Held:
        """Hold `steps` steps in each of which `each` requests arrive, and end."""
        prompt = partial(self._prompt, tokens)
        return self._hold(HELD_BATCH, HELD_TOKENS, steps, each, prompt)

    def _hold(
        self,
        batch: int,
        tokens: int,
        steps: int,
        arrivals: int,
        prompt: Callable[[], list[int]],
    ) -> Held:
        """Hold `steps` steps; in each, `arrivals` requests with a `prompt` arrive."""
        self._start(batch, tokens, steps)
        self._helpers = helpers()
        first, began_s = self._steps, time.monotonic()
        before = cpu_ns_beside(self._of_vllm, self._helpers)
        for _ in range(steps):
            for _ in range(arrivals):
                self.add(prompt(), 1)
            self._step()
        ended_s = time.monotonic()
        after = cpu_ns_beside(self._of_vllm, helpers())
        self._end()
        time_s = (began_s + ended_s) / 2
        return Held(
            first=first,
            end=first + steps,
            time_s=time_s - self._began_s,
            age_s=time_s - self._reset_s,
            threads_us=(after.threads - before.threads) / 1e3 / steps,
            processes_us=(after.processes - before.processes) / 1e3 / steps,
        )

    def without_requests(self) -> tuple[float, float]:
        """Return steps per second, and CPU in ms per second, without a request.

        As vLLM's busy loop does, the engine steps while its scheduler has something.
        The CPU time is that of these steps and of all that is beside this thread.
        """
        self._forget()
        self._helpers = helpers()
        first, began_s, stepping_ns = self._steps, time.monotonic(), 0
        before = cpu_ns_beside(self._of_vllm, self._helpers)
        while time.monotonic() - began_s < IDLE_S:
            if self.core.scheduler.has_requests():
                step_began_ns = time.thread_time_ns()
                self._step()
                stepping_ns += time.thread_time_ns() - step_began_ns
            else:
                time.sleep(HELD_PAUSE_S)
        after = cpu_ns_beside(self._of_vllm, helpers())
        took_s = time.monotonic() - began_s
        cpu_ns = stepping_ns + sum(after) - sum(before)
        steps_per_s = (self._steps - first) / took_s
        return round(steps_per_s, 2), round(cpu_ns / 1e6 / took_s, 2)

    def _scatter(self, run: int) -> None:
        """Have the pool hand out runs of `run` neighbours, none next to the one before.

        A request may get the end of one run first, so it has one fragment more.
        """
        queue = self._pool.free_block_queue
        free = queue.popleft_n(queue.num_free_blocks)
        free.sort(key=lambda block: block.block_id)
        runs = [free[first : first + run] for first in range(0, len(free), run)]
        queue.append_n(list(chain.from_iterable(runs[::2] + runs[1::2])))

    def _start(self, batch: int, tokens: int, steps: int) -> None:
        """Prefill `batch` requests that decode for longer than a hold."""
        for _ in range(batch):
            self.add(self._prompt(tokens), PREFILL_STEPS + COLD_STEPS + steps)
        requests = self._scheduler.requests
        while any(
            request.num_computed_tokens < tokens for request in requests.values()
        ):
            self._step()
        for _ in range(COLD_STEPS):
            self._step()

    def _end(self) -> None:
        self.core.abort_requests(list(self._scheduler.requests))
        self._finish()

    def _finish(self) -> None:
        deadline_s = time.monotonic() + FINISH_DEADLINE_S
        while self.core.scheduler.has_requests():
            if time.monotonic() > deadline_s:
                if self._scheduler.requests:
                    raise ConnectorError(
                        "requests do not end: the connector holds them"
                    )
                raise ConnectorError(
                    "the connector keeps an engine without requests stepping: "
                    "has_pending_push_work"
                )
            self._step()
            if not self.core.scheduler.get_num_unfinished_requests():
                # All are done but for the connector, which wants the core.
                time.sleep(HELD_PAUSE_S)

    def _forget(self) -> None:
        """Reset the prefix cache. Raises ConnectorError if blocks stay in use."""
        self._finish()
        held = len(self._scheduler.requests)
        deadline_s = time.monotonic() + FREED_DEADLINE_S
        while not self.core.scheduler.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise ConnectorError(
                    f"the connector holds the blocks of {held} finished requests: "
                    "request_finished() said that it would, and get_finished() did "
                    f"not report them within {FREED_DEADLINE_S:g} s"
                )
            # Only an engine that steps calls get_finished().
            self.add(self._prompt(BLOCK_SIZE), 1)
            self._finish()
            time.sleep(FREED_PAUSE_S)
        self._reset_s = time.monotonic()

    def _step(self) -> None:
        self.core.step()
        self._steps += 1
        if self._steps % WATCHED_STEPS == 0:
            self._require_bounded()

    def _require_bounded(self) -> None:
        """Raise ConnectorError if the passes write, or take, more than they may."""
        took_s = time.monotonic() - self._began_s
        written = written_bytes(self._helpers) - self._written_before
        if written > self._most_bytes:
            raise ConnectorError(
                f"the connector wrote {written / 2**30:.1f} GiB of files in "
                f"{took_s:.0f} s and would fill the disk: it is measured along no "
                "axis; give it a smaller store, or measure it in servers, as "
                "`kvtax sweep --connector` does"
            )
        if took_s > self._most_s:
            raise ConnectorError(
                f"the levels of all axes were not held within {self._most_s:.0f} s, in "
                f"{self._steps:,} steps: the connector is too slow for this; measure "
                "it in servers, as `kvtax sweep --connector` does"
            )

    def _prompt(self, tokens: int) -> list[int]:
        """Make a prompt that shares no block with any other."""
        number, ids = next(self._prompts), []
        for _ in range(PROMPT_IDS):
            number, own = divmod(number, VOCABULARY)
            ids.append(own + 1)
        return ids * (tokens // PROMPT_IDS)


class CpuTimes(NamedTuple):
    """CPU time in ns of the other threads of this process, and of its helpers."""

    threads: int
    processes: int


def helpers() -> list[int]:
    """List the processes below the supervisor, but for this one."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(os.getppid()).children(recursive=True)
        return [process.pid for process in below if process.pid != os.getpid()]
    return []


def threads_of_vllm() -> set[int]:
    """Return the ids of the threads that were there before the connector."""
    ids: set[int] = import_module(f"{RECORDER}.threads").threads_of_executor()
    return ids | {threading.get_native_id()}


def cpu_ns_beside(of_vllm: Iterable[int], helpers: Iterable[int]) -> CpuTimes:
    """Return the CPU time of all threads but vLLM's and the recorder's."""
    others = sum(map(_thread_ns, {*of_vllm, *_recorders()}))
    threads = time.process_time_ns() - others
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_ns = round((ended.ru_utime + ended.ru_stime) * 1e9)
    return CpuTimes(threads, ended_ns + sum(map(_process_ns, helpers)))


def written_bytes(helpers: Iterable[int]) -> int:
    """Return the bytes that this process and its helpers have written to files."""
    return _written("self") + sum(_written(str(pid)) for pid in helpers)


def _recorders() -> Iterator[int]:
    """Yield the ids of the recorder's threads, by the code that they run.

    By a name they would not be known: anybody can give a thread any name.
    """
    for thread in threading.enumerate():
        module = getattr(getattr(thread, "_target", None), "__module__", None) or ""
        if module.startswith(f"{RECORDER}.") and thread.native_id is not None:
            yield thread.native_id


def _thread_ns(thread: int) -> int:
    with suppress(OSError):
        # The clock of a thread, as in the kernel's CPUCLOCK_PERTHREAD | _SCHED.
        return time.clock_gettime_ns((~thread << 3) | 6)
    return 0


def _process_ns(pid: int) -> int:
    with suppress(OSError):
        # The clock of a process, as in the kernel's CPUCLOCK_SCHED.
        return time.clock_gettime_ns((~pid << 3) | 2)
    return 0


def _written(pid: str) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0


def hold(engine: SteppedEngine, axis: str, levels: list[int], steps: int) -> list[Held]:
    """Hold `axis` at each of `levels`, in their order, for `steps` steps."""
    held: list[Held] = getattr(engine, axis)(levels, steps)
    return held


def idle(engine: SteppedEngine) -> tuple[float, float]:
    return engine.without_requests()


def has_tier(engine: SteppedEngine) -> bool:
    return engine.has_tier


def main() -> None:
    model, socket = sys.argv[1:]
    given = json.loads(os.environ.pop(GIVEN))
    engine = SteppedEngine(Path(model), **given)
    serve(engine, socket, hold, has_tier, idle)


if __name__ == "__main__":
    main()
