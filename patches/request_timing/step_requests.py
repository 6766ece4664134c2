# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""
engine_request.jsonl: what became of each request, and in which engine steps.

With KVTAX_STEP_RECORDS_DIR set to a directory, REQUESTS is the recorder of this
process, otherwise None. Request ids are hashed, unless KVTAX_REQUEST_IDS is "plain".
"""

import hashlib
import os
import re
import time
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

import msgspec
from vllm.v1.step_record_file import RecordFile

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

# What vLLM adds to the id that the client knows, so that ids are unique.
_ADDED = re.compile(r"-[0-9a-f]{8}$")

now_ns = time.perf_counter_ns


class RequestRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """One request; what never happened to it is left out of the line."""

    id: str
    arrival_ns: int
    prompt_tokens: int
    before_engine_us: float | None = None
    first_step: int | None = None
    first_token_step: int | None = None
    last_step: int | None = None
    finished_ns: int | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    external_tokens: int | None = None
    output_tokens: int = 0
    preemptions: int = 0
    preempted_steps: list[int] = []
    kv_wait_ns: list[int] = []


class RequestRecorder:
    """Called by the scheduler, in the engine's one thread.

    A step costs a few checks. Only requests that wait for their first token, or that
    start, stop or finish in the step, are looked at.
    """

    def __init__(self, directory: str, plain_ids: bool):
        self._directory = directory
        self._plain_ids = plain_ids
        self._file: RecordFile | None = None
        self._open: dict[str, RequestRecord] = {}
        self._without_token: set[str] = set()
        self._step_id: int | None = None

    def add(self, request: "Request") -> None:
        """The scheduler got a request."""
        if self._file is None:
            header = {"ids": "plain" if self._plain_ids else "hashed"}
            self._file = RecordFile(self._directory, "engine_request", header)
            # Those that never ended: before the file is written for the last time.
            Finalize(None, self._append_open, exitpriority=20)
        record = RequestRecord(
            self._name(request.request_id), now_ns(), request.num_prompt_tokens
        )
        record.before_engine_us = max(time.time() - request.arrival_time, 0) * 1e6
        self._open[request.request_id] = record

    def begin_kv_wait(self, request: "Request") -> None:
        record = self._open.get(request.request_id)
        if record is not None and len(record.kv_wait_ns) % 2 == 0:
            record.kv_wait_ns = [*record.kv_wait_ns, now_ns()]

    def end_kv_wait(self, request_id: str) -> None:
        record = self._open.get(request_id)
        if record is not None and len(record.kv_wait_ns) % 2:
            record.kv_wait_ns.append(now_ns())

    def begin_update(
        self, scheduler: "Scheduler", scheduler_output: "SchedulerOutput"
    ) -> None:
        """The step's requests were scheduled, and the model has run."""
        step_id = self._step_id = getattr(scheduler_output, "step_id", None)
        if step_id is None:
            # Neither step_timing_v1 nor v2 is applied.
            return
        for new in scheduler_output.scheduled_new_reqs:
            self._note_first_step(new.req_id, scheduler.requests.get(new.req_id))
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._note_resumed(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            record = self._open.get(request_id)
            if record is not None:
                record.preempted_steps = [*record.preempted_steps, step_id]

    def end_update(self, scheduler: "Scheduler") -> None:
        for request_id in list(self._without_token):
            request = scheduler.requests.get(request_id)
            if request is not None and request.num_output_tokens:
                self._open[request_id].first_token_step = self._step_id
                self._without_token.discard(request_id)
        self._step_id = None

    def finish(self, request: "Request") -> None:
        """The request has ended, in a step or between two."""
        record = self._open.pop(request.request_id, None)
        if record is None:
            return
        record.finished_ns = now_ns()
        record.last_step = self._step_id
        record.output_tokens = request.num_output_tokens
        record.preemptions = request.num_preemptions
        reason = request.get_finished_reason()
        record.finish_reason = None if reason is None else str(reason)
        if request.request_id in self._without_token:
            self._without_token.discard(request.request_id)
            if request.num_output_tokens:
                record.first_token_step = self._step_id
        self._file.append(record)

    def _note_first_step(self, request_id: str, request: "Request | None") -> None:
        record = self._open.get(request_id)
        if record is None or request is None:
            return
        if record.first_step is not None:
            # The V2 model runner is told of a resumed request as of a new one.
            self._note_resumed(request_id)
            return
        record.first_step = self._step_id
        self._without_token.add(request_id)
        # From 0.20 on in PrefillStats, until the first output takes it.
        stats = getattr(request, "prefill_stats", None)
        if stats is not None:
            record.cached_tokens = stats.num_local_cached_tokens
            record.external_tokens = stats.num_external_cached_tokens
        elif hasattr(request, "num_external_computed_tokens"):
            record.external_tokens = request.num_external_computed_tokens
            record.cached_tokens = request.num_cached_tokens - record.external_tokens

    def _note_resumed(self, request_id: str) -> None:
        record = self._open.get(request_id)
        if record is not None and len(record.preempted_steps) % 2:
            record.preempted_steps.append(self._step_id)

    def _name(self, request_id: str) -> str:
        name = _ADDED.sub("", request_id)
        if self._plain_ids:
            return name
        return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()

    def _append_open(self) -> None:
        for record in self._open.values():
            self._file.append(record)
        self._open.clear()


_directory = os.environ.get("KVTAX_STEP_RECORDS_DIR")
_plain_ids = os.environ.get("KVTAX_REQUEST_IDS") == "plain"
REQUESTS = RequestRecorder(_directory, _plain_ids) if _directory else None
