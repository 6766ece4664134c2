# SPDX-License-Identifier: Apache-2.0
"""engine_step.jsonl and worker_step.r<rank>.jsonl: one record per step.

The step_timing patches write them inside vLLM. A time that was not taken is absent,
never zero; the counts are always there when their patch is applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.records.lines import read_lines


class FileHeader(msgspec.Struct, kw_only=True):
    """What the headers of all files that the patches write have."""

    clock: str | None = None
    """The clock of `t_ns`: CLOCK_MONOTONIC."""
    units: dict[str, str] = {}
    """Unit of the fields whose name matches a pattern."""
    vllm_version: str | None = None
    """The version of vLLM that is measured."""
    pid: int | None = None
    """The process that writes the file."""
    began_ns: int | None = None
    """When the file was begun."""
    began_unix_ns: int | None = None
    """The same moment by the wall clock; older files do not say."""
    boot_id: str | None = None
    """Of the running kernel: files that share it share the clock."""
    label: dict[str, Any] = {}
    """`config`, `repeat` and `patches` of the trial."""


class EngineHeader(FileHeader, tag_field="schema", tag="kvtax.engine_step/1"):
    """Header; written by the engine core. Two such files in a trial are an error."""

    every: int = 1
    """Of so many steps one was recorded."""
    methods: list[str] = []
    """The connector's methods that are timed on this side: the keys that the records'
    `connector_calls`, `connector_us` and `connector_self_us` may have."""


class WorkerHeader(FileHeader, tag_field="schema", tag="kvtax.worker_step/1"):
    """Header; written by a worker."""

    rank: int = 0
    """The worker's rank."""
    every: int = 1
    """Of so many steps one was recorded."""
    methods: list[str] = []
    """The connector's methods that are timed on this side: the keys that the records'
    `connector_calls`, `connector_us` and `connector_self_us` may have."""


class EngineStep(msgspec.Struct, omit_defaults=True):
    """One step of the engine core."""

    step_id: int
    """Given in `schedule()`, carried by the scheduler output; unique in a trial."""
    t_ns: int
    """When the step began; decides its phase."""
    schedule_us: float | None = None
    """Time in `Scheduler.schedule()`, `build_connector_meta` included."""
    build_meta_us: float | None = None
    """Time in the connector's `build_connector_meta`; absent without a connector."""
    step_us: float | None = None
    """From the start of `schedule()` to the end of `update_from_output()` of the same
    step; under async scheduling steps overlap."""
    running: int | None = None
    """Requests in the running queue."""
    waiting: int | None = None
    """Requests in the waiting queue."""
    scheduled: int | None = None
    """Requests scheduled in this step: the batch size."""
    prefill_tokens: int | None = None
    """Prompt tokens scheduled."""
    decode_tokens: int | None = None
    """Tokens scheduled that do not belong to a prompt."""
    cache_size: int | None = None
    """|cache|: cached block hashes at the end of `schedule()`,
    `len(block_pool.cached_block_hash_to_block)`. This field and those below need the
    patch `step_timing_v2`, and a report needs them."""
    free_blocks: int | None = None
    """Blocks in the free queue."""
    preemptions: int | None = None
    """Requests preempted."""
    update_us: float | None = None
    """Time in `update_from_output()`."""
    schedule_cpu_us: float | None = None
    """CPU time of the engine's thread in `schedule()`."""
    update_cpu_us: float | None = None
    """CPU time of the engine's thread in `update_from_output()`."""
    thread_cpu_us: float | None = None
    """CPU time of the engine's thread since the previous step ended; absent in the
    first step."""
    connector_calls: dict[str, int] = {}
    """Calls of the connector's methods, by name; absent without any. What was called
    since the previous step ended counts for the step being scheduled, what was called
    between `schedule()` and the end of a step for the step that ends. A method of a
    MultiConnector's child is named like `NixlConnector[0].get_finished`. Not timed, as
    they can take no time: methods that only return a constant, and those that the
    connector inherits from vLLM's base class."""
    connector_us: dict[str, float] = {}
    """Time in these calls, with the calls of timed methods that they made."""
    connector_self_us: dict[str, float] = {}
    """Time in these calls, without the calls of timed methods that they made. The sum
    is the connector's time on this side."""

    def found_blocks(self, block_tokens: int) -> int | None:
        """Cached blocks that the step did not bring itself; None if not recorded.

        Positive only if something was cached before the step.
        """
        if self.cache_size is None or self.prefill_tokens is None:
            return None
        return self.cache_size - self.prefill_tokens // block_tokens


class WorkerStep(msgspec.Struct, omit_defaults=True):
    """One step of a worker. It joins the engine's record with the same `step_id` in a
    trial; of several ranks the one counts whose `execute_model_us` is longest."""

    step_id: int
    """As in the engine's record."""
    t_ns: int
    """When the worker began the step."""
    execute_model_us: float | None = None
    """Time in `execute_model`, the connector's methods included."""
    bind_us: float | None = None
    """Time in the connector's `bind_connector_metadata`. This field and the next three
    are absent without a connector."""
    start_load_kv_us: float | None = None
    """Time in `start_load_kv`."""
    wait_for_save_us: float | None = None
    """Time in `wait_for_save`; also absent in a step that schedules nothing."""
    get_finished_us: float | None = None
    """Time in `get_finished`, from vLLM 0.30 on in `get_transfer_results`."""
    connector_calls: dict[str, int] = {}
    """Calls of the connector's methods, by name; absent without any. What was called
    before the next step began counts for this one. Names are as in the engine's
    record."""
    connector_us: dict[str, float] = {}
    """Time in these calls, with the calls of timed methods that they made."""
    connector_self_us: dict[str, float] = {}
    """Time in these calls, without the calls of timed methods that they made. The sum
    is the connector's time on this side."""


# Method by method, as the hooks around them take it.
WORKER_TIMES = (
    "execute_model_us",
    "bind_us",
    "start_load_kv_us",
    "wait_for_save_us",
    "get_finished_us",
)


def first_step(path: Path) -> EngineStep | None:
    """The engine's first step; None if it made none. Raises RecordsError."""
    records = read_lines(path, EngineHeader, EngineStep, limit=1).records
    return records[0] if records else None
