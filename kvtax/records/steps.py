# SPDX-License-Identifier: Apache-2.0
"""Records that a process of vLLM writes: steps, threads, and forwards of a device.

The recorder (probe/kvtax_probe) writes engine_step.jsonl, worker_step.r<rank>.jsonl and
threads.jsonl; the null device (kvtax/engine/vllm_plugin/) writes device_step.jsonl. A
time that was not taken is absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kvtax.records import RecordsError
from kvtax.records.files import Lines, read_lines
from kvtax.records.parts import whole

# A moment or a number of a step; any other is a damaged line. Sums fit into 64 bits.
MOST = 2**62
Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
# A step that took longer than an hour was a clock that jumped.
LONGEST_STEP_US = 3_600e6
Us = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_STEP_US)]


class FileHeader(msgspec.Struct, kw_only=True):
    """Fields of the headers of all files that the patches write."""

    clock: str | None = None
    """The clock of `t_ns`: CLOCK_MONOTONIC."""
    units: dict[str, str] = {}
    """Unit of the fields whose name matches a pattern."""
    vllm_version: str | None = None
    """The version of vLLM that is measured."""
    pid: int | None = None
    """The process that writes the file."""
    began_ns: Natural | None = None
    """When the file was begun."""
    began_unix_ns: Natural | None = None
    """The same moment by the wall clock; older files do not say."""
    boot_id: str | None = None
    """Of the running kernel: files that share it share the clock."""
    life: str | None = None
    """The folder of this life of one engine: start, host, data-parallel rank, pid."""
    host: str | None = None
    """The host of the process."""
    label: dict[str, Any] = {}
    """`config`, `repeat` and `patches` of the trial."""
    lost: Natural = 0
    """Records of this file that were lost before it began: those of older halves that
    the limit dropped, and those that no disk took."""


def another_life(own: FileHeader, other: FileHeader, process: bool = True) -> str:
    """Say why the `other` file is not of the same engine life; empty if it may be.

    Files of one `process` have one process id, too.
    """
    facts = {"life": "life", "kernel": "boot_id", "vLLM": "vllm_version"}
    facts |= {"process id": "pid"} if process else {}
    for name, field in facts.items():
        mine, its = getattr(own, field, None), getattr(other, field, None)
        if None not in (mine, its) and mine != its:
            return f"of another life of the engine: {name} {its}, not {mine}"
    return ""


class EngineHeader(FileHeader, tag_field="schema", tag="kvtax.engine_step/1"):
    """Header; written by the engine core. Two such files in a trial are an error."""

    dp_rank: int = 0
    """The engine's data-parallel rank."""
    cpu_every: int = 1
    """One step in so many has the CPU clocks, drawn at random."""
    every: int = 1
    """One step in so many was recorded, drawn at random."""
    connectors: list[str] = []
    """Classes of the connector and of those in it; empty in older files."""
    methods: list[str] = []
    """The connector's methods that are timed on this side: the keys that the records'
    `connector_calls`, `connector_us` and `connector_self_us` may have."""
    constant: list[str] = []
    """Methods that only return a constant: they take no time, and are not timed."""
    not_timed: dict[str, str] = {}
    """Methods that cannot be timed, and why."""
    wrapper_us: dict[str, float] = {}
    """Time of the recorder's wrapper, which is taken out of all times: `inside` of a
    timed call, all of it (`timed`), and of a call that is `counted`."""


class WorkerHeader(FileHeader, tag_field="schema", tag="kvtax.worker_step/1"):
    """Header; written by a worker."""

    rank: int = 0
    """The worker's rank."""
    stage: int | None = None
    """The worker's stage of the pipeline; older files do not say."""
    every: int = 1
    """One step in so many was recorded, drawn at random."""
    connectors: list[str] = []
    """Classes of the connector and of those in it; empty in older files."""
    methods: list[str] = []
    """The connector's methods that are timed on this side: the keys that the records'
    `connector_calls`, `connector_us` and `connector_self_us` may have."""
    constant: list[str] = []
    """Methods that only return a constant: they take no time, and are not timed."""
    not_timed: dict[str, str] = {}
    """Methods that cannot be timed, and why."""
    wrapper_us: dict[str, float] = {}
    """Time of the recorder's wrapper, which is taken out of all times: `inside` of a
    timed call, all of it (`timed`), and of a call that is `counted`."""


class Unit(NamedTuple):
    """Unit of a field of a step record."""

    name: str


class StepField(NamedTuple):
    """A row of the table of step fields, `FIELDS`."""

    name: str
    unit: str
    side: Literal["engine", "worker"]
    by_method: bool
    """Whether the field has a value for each of the connector's methods."""


class EngineStep(msgspec.Struct, omit_defaults=True):
    """One step of the engine core."""

    step_id: Annotated[Natural, Unit("")]
    """Given in `schedule()`, carried by the scheduler output; unique in a trial."""
    t_ns: Annotated[Natural, Unit("ns")]
    """When the step began; decides its phase."""
    schedule_us: Annotated[Us | None, Unit("us")] = None
    """Time in `Scheduler.schedule()`, `build_connector_meta` included."""
    build_meta_us: Annotated[Us | None, Unit("us")] = None
    """Time in the connector's `build_connector_meta`; absent where it is not timed."""
    step_us: Annotated[Us | None, Unit("us")] = None
    """From the start of `schedule()` to the end of `update_from_output()` of the same
    step; under async scheduling steps overlap."""
    running: Annotated[Natural | None, Unit("requests")] = None
    """Requests in the running queue."""
    waiting: Annotated[Natural | None, Unit("requests")] = None
    """Requests in the waiting queue."""
    scheduled: Annotated[Natural | None, Unit("requests")] = None
    """Requests scheduled in this step: the batch size."""
    prefill_tokens: Annotated[Natural | None, Unit("tokens")] = None
    """Prompt tokens scheduled."""
    decode_tokens: Annotated[Natural | None, Unit("tokens")] = None
    """Tokens scheduled that do not belong to a prompt."""
    cache_size: Annotated[Natural | None, Unit("blocks")] = None
    """|cache|: cached block hashes at the end of `schedule()`,
    `len(block_pool.cached_block_hash_to_block)`. A report needs this
    field and those below."""
    free_blocks: Annotated[Natural | None, Unit("blocks")] = None
    """Blocks in the free queue."""
    preemptions: Annotated[Natural | None, Unit("requests")] = None
    """Requests preempted; absent if none was."""
    update_us: Annotated[Us | None, Unit("us")] = None
    """Time in `update_from_output()`."""
    schedule_cpu_us: Annotated[Us | None, Unit("us")] = None
    """CPU time of the engine's thread in `schedule()`, in drawn steps."""
    update_cpu_us: Annotated[Us | None, Unit("us")] = None
    """CPU time of the engine's thread in `update_from_output()`, in drawn steps."""
    thread_cpu_us: Annotated[Us | None, Unit("us")] = None
    """CPU time of the engine's thread since the previous step ended, in drawn steps. In
    any other step that took over 10 ms, since its clock was read last: after the last
    step that has this field."""
    connector_calls: Annotated[dict[str, Natural], Unit("calls")] = {}
    """Calls of the connector's methods, by name; a method with a time was called once
    if it is not here, and one without a time was not timed in this step. What was
    called since the previous step ended counts for the step being scheduled, what was
    called between `schedule()` and the end of a step for the step that ends. A method
    of a MultiConnector's child is named like `NixlConnector[0].get_finished`. Methods
    that only return a constant, or that the connector inherits from vLLM's base class,
    are not timed."""
    connector_us: Annotated[dict[str, Us], Unit("us")] = {}
    """Time in these calls, with the calls of timed methods that they made; absent where
    it is the same as without."""
    connector_self_us: Annotated[dict[str, Us], Unit("us")] = {}
    """Time in these calls, without the calls of timed methods that they made. A method
    with a field of its own is absent if it was called once and called no other: its
    time is in its field. The sum is the connector's time on this side."""

    def found_blocks(self, block_tokens: int) -> int | None:
        """Count cached blocks that the step did not bring itself; None if not recorded.

        Positive only if something was cached before the step.
        """
        if self.cache_size is None or self.prefill_tokens is None:
            return None
        return self.cache_size - self.prefill_tokens // block_tokens


class WorkerStep(msgspec.Struct, omit_defaults=True):
    """One step of a worker. It joins the engine's record with the same `step_id` in a
    trial. Of several ranks of a stage the one counts whose `execute_model_us` is
    longest; the stages of a pipeline add up."""

    step_id: Annotated[Natural, Unit("")]
    """As in the engine's record."""
    t_ns: Annotated[Natural, Unit("ns")]
    """When the worker began the step."""
    execute_model_us: Annotated[Us | None, Unit("us")] = None
    """Time in `execute_model`, the connector's methods included."""
    bind_us: Annotated[Us | None, Unit("us")] = None
    """Time in the connector's `bind_connector_metadata`. This field and the next three
    are absent where the method is not timed."""
    start_load_kv_us: Annotated[Us | None, Unit("us")] = None
    """Time in `start_load_kv`."""
    wait_for_save_us: Annotated[Us | None, Unit("us")] = None
    """Time in `wait_for_save`; also absent in a step that schedules nothing."""
    get_finished_us: Annotated[Us | None, Unit("us")] = None
    """Time in `get_finished`, from vLLM 0.30 on in `get_transfer_results`."""
    connector_calls: Annotated[dict[str, Natural], Unit("calls")] = {}
    """Calls of the connector's methods, by name. What was called before the next step
    began counts for this one. This field and the next two are as in the engine's
    record."""
    connector_us: Annotated[dict[str, Us], Unit("us")] = {}
    """Time in these calls, with the calls of timed methods that they made."""
    connector_self_us: Annotated[dict[str, Us], Unit("us")] = {}
    """Time in these calls, without the calls of timed methods that they made."""


def _fields() -> Iterator[StepField]:
    sides: dict[Literal["engine", "worker"], type[msgspec.Struct]]
    sides = {"engine": EngineStep, "worker": WorkerStep}
    for side, kind in sides.items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            value, *_, measured = get_args(hint)
            by_method = get_origin(value) is dict
            yield StepField(name, measured.name, side, by_method)


# The table of step fields. Column types, tables of documents, made-up records and the
# columns of readers derive from it; the patches' own structs are tested against it.
FIELDS = tuple(_fields())
# Counts of an engine step: queues, tokens and blocks.
ENGINE_COUNTS = tuple(
    field.name
    for field in FIELDS
    if field.side == "engine" and field.unit in ("requests", "tokens", "blocks")
)
# Times of a worker step, method by method.
WORKER_TIMES = tuple(
    field.name
    for field in FIELDS
    if field.side == "worker" and field.unit == "us" and not field.by_method
)
# Fields of single methods of the outermost connector, by side.
METHOD_FIELDS = {
    "scheduler": {"build_connector_meta": "build_meta_us"},
    "worker": {
        "bind_connector_metadata": "bind_us",
        "start_load_kv": "start_load_kv_us",
        "wait_for_save": "wait_for_save_us",
        "get_finished": "get_finished_us",
    },
}


def method_fields(side: str, methods: Sequence[str]) -> dict[str, str]:
    """Return the fields of single methods, of those that a header names.

    From vLLM 0.30 on the worker calls `get_transfer_results` in the place of
    `get_finished`, and the field is its.
    """
    fields = {name: f for name, f in METHOD_FIELDS[side].items() if name in methods}
    if side == "worker" and "get_transfer_results" in methods:
        fields.pop("get_finished", None)
        fields["get_transfer_results"] = "get_finished_us"
    return fields


def calls_by_method(
    step: EngineStep | WorkerStep, fields: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return calls and self times in us by method, with what a record leaves out.

    `fields` are those of single methods.
    """
    times = {
        name: us for name, f in fields.items() if (us := getattr(step, f)) is not None
    }
    times |= step.connector_self_us
    return dict.fromkeys(times, 1) | step.connector_calls, times


def first_step(path: Path) -> EngineStep | None:
    """Read the engine's first good step; None without steps. Raises RecordsError."""
    records = read_lines(path, EngineHeader, EngineStep, limit=1, strict=False).records
    return records[0] if records else None


class ThreadsHeader(FileHeader, tag_field="schema", tag="kvtax.threads/1"):
    """Header; written by the engine core."""


class ThreadTimes(msgspec.Struct, kw_only=True):
    """CPU time of each thread of the engine's process since the record before."""

    t_ns: Natural
    """When the record was made."""
    step_id: Natural
    """The last step that had begun."""
    threads: dict[str, float]
    """CPU time in us by thread: its name in `threading`, or else the kernel's, `#` and
    its id. `vllm` or `recorder` stands before the name of one that runs code of these.
    `model executor` are all that were there once vLLM had made that, but the main
    thread, and `ended threads` those that ended since the record before."""


class DeviceHeader(FileHeader, tag_field="schema", tag="kvtax.device_step/1"):
    """Header; written in the worker."""


class DeviceStep(msgspec.Struct):
    """The forward of one step."""

    step_id: Natural
    """As in the engine's record."""
    launched_ns: Natural
    """When the host launched it."""
    began_ns: Natural
    """When the device began it: at once, or after the forward before it."""
    ended_ns: Natural
    """When the device had ended it."""


def read_device_steps(path: Path, strict: bool = True) -> Lines[DeviceHeader]:
    """Read all forwards of a file, in order. Raises RecordsError."""
    return read_lines(path, DeviceHeader, DeviceStep, strict=strict)


STEPS = "engine_step.jsonl"


def only_life(folder: Path) -> Path:
    """Return the folder of the one engine life whose records are in `folder`.

    Returns `folder` itself where there are none, so that a missing file has a name.
    Raises RecordsError if there are several.
    """
    inner = sorted(path for path in folder.glob("*") if path.is_dir())
    # A life whose writer was killed while it began a new file has the older part alone.
    folders = [
        life
        for life in (folder, *inner)
        if any(whole(path).name == STEPS for path in life.glob(f"{STEPS}*"))
    ]
    if len(folders) > 1:
        names = ", ".join(life.name for life in folders)
        raise RecordsError(
            f"{folder}: records of {len(folders)} engine lives ({names}), of which "
            "only one was expected: a server of one engine that starts once"
        )
    return folders[0] if folders else folder
