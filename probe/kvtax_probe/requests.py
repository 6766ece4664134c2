# SPDX-License-Identifier: Apache-2.0
"""engine_request.jsonl: the life of each request, and in which engine steps.

Request ids are hashed with a key of the engine's life, which is a file beside the
records, unless KVTAX_REQUEST_IDS is "plain".
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from types import MethodType
from typing import Any

import msgspec

from .connector import shadow
from .files import RecordFile, records_directory
from .folder import KEY_FILE, LifeFolder
from .settings import has_plain_ids

logger = logging.getLogger("vllm.kvtax_probe")

# Suffix by which vLLM makes the client's ids unique.
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")

now_ns = time.perf_counter_ns


class RequestRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """One request; events that never happened are left out of the line."""

    id: str
    arrival_ns: int
    prompt_tokens: int
    before_engine_us: float | None = None
    first_step: int | None = None
    first_token_step: int | None = None
    last_step: int | None = None
    finished_ns: int | None = None
    finish_reason: Any = None
    cached_tokens: int | None = None
    external_tokens: int | None = None
    output_tokens: int = 0
    preemptions: int = 0
    preempted_steps: list[int] | None = None
    kv_wait_ns: list[int] | None = None


# Puts a call on a scheduler; its class may guard attributes by a __setattr__.
put = object.__setattr__


class RequestRecorder:
    """Recorder of a scheduler's requests, in the engine's one thread.

    A step costs a few checks. Only requests that wait for their first token or for KV,
    or that start, stop or finish in the step, are looked at.
    """

    __slots__ = (
        "_add",
        "_file",
        "_free",
        "_key",
        "_life",
        "_open",
        "_plain_ids",
        "_scheduler",
        "detached",
        "step_id",
        "waiting_for_kv",
        "with_external_kv",
        "without_token",
    )

    def __init__(self, life: str, scheduler: Any):
        self._life = life
        self._plain_ids = has_plain_ids()
        self._key = secrets.token_bytes(16)
        self._scheduler = scheduler
        self._file: RecordFile | None = None
        self.detached = True
        self._open: dict[str, RequestRecord] = {}
        # Requests that have begun, and have no token yet.
        self.without_token: dict[str, Any] = {}
        # Requests that got blocks for the connector's KV in this step, and when.
        self.with_external_kv: list[tuple[Any, int]] = []
        # Requests whose KV has not come yet.
        self.waiting_for_kv: set[str] = set()
        # The step that was scheduled or updated last.
        self.step_id: int | None = None
        if hasattr(scheduler, "add_request") and hasattr(scheduler, "_free_request"):
            self._add, self._free = scheduler.add_request, scheduler._free_request
            put(scheduler, "add_request", self._noted_add)
            put(scheduler, "_free_request", self._noted_free)
        connector = getattr(scheduler, "connector", None)
        if hasattr(connector, "update_state_after_alloc"):
            self._watch_allocations(connector)

    def note_scheduled(self, step_id: int, scheduler_output: Any) -> None:
        """Note the requests that a step begins, stops, or has wait for KV."""
        for new in scheduler_output.scheduled_new_reqs:
            self._note_first_step(step_id, new.req_id)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._note_resumed(step_id, self._open.get(request_id))
        for request_id in scheduler_output.preempted_req_ids or ():
            record = self._open.get(request_id)
            if record is not None:
                record.preempted_steps = [*(record.preempted_steps or ()), step_id]
        if self.with_external_kv:
            self._note_waits()

    def note_received(self, model_runner_output: Any) -> None:
        """Note the requests whose KV has come."""
        transfers = getattr(model_runner_output, "kv_connector_output", None)
        received = transfers and transfers.finished_recving
        for request_id in self.waiting_for_kv.intersection(received or ()):
            self.waiting_for_kv.remove(request_id)
            waits = self._open[request_id].kv_wait_ns
            assert waits is not None
            waits.append(now_ns())

    def note_first_tokens(self, step_id: int) -> None:
        """Note the requests that got their first token in the step."""
        for request_id, request in list(self.without_token.items()):
            if request.num_output_tokens:
                self._open[request_id].first_token_step = step_id
                del self.without_token[request_id]

    def close(self) -> None:
        """Write what is left, and the requests that have not ended."""
        if self._file is not None:
            for record in self._open.values():
                self._file.append(record)
            self._open.clear()
            self._file.flush()

    def _give_up(self) -> None:
        """Let go of the requests: the engine must serve all the same."""
        logger.exception("kvtax: no request records from here on")
        self.detached = True
        self._open.clear()
        self.without_token.clear()
        self.waiting_for_kv.clear()

    def _watch_allocations(self, connector: Any) -> None:
        allocated = connector.update_state_after_alloc

        def update_state_after_alloc(
            self_: Any, request: Any, /, *args: Any, **kwargs: Any
        ) -> Any:
            # The blocks, and how many tokens' KV will come: mostly none.
            if (len(args) != 2 or args[1]) and not self.detached:
                self.with_external_kv.append((request, now_ns()))
            return allocated(request, *args, **kwargs)

        # As a bound method, as all wrappers of connectors.
        shadow(connector, MethodType(update_state_after_alloc, connector))

    def _noted_add(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin the record of a request; a streaming session may have it already."""
        try:
            if not self.detached and request.request_id not in self._open:
                if self._file is None:
                    self._file = self._begin_file()
                self._open[request.request_id] = RequestRecord(
                    request.request_id,
                    now_ns(),
                    request.num_prompt_tokens,
                    (time.time() - request.arrival_time) * 1e6,
                )
        except Exception:
            self._give_up()
        if args or kwargs:
            return self._add(request, *args, **kwargs)
        return self._add(request)

    def _noted_free(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """End the record of a request, in a step or between two."""
        try:
            request_id = request.request_id
            record = None if self.detached else self._open.pop(request_id, None)
            if record is not None and self._file is not None:
                record.finished_ns = now_ns()
                record.last_step = self.step_id
                record.output_tokens = request.num_output_tokens
                record.preemptions = request.num_preemptions
                record.finish_reason = request.get_finished_reason()
                self.waiting_for_kv.discard(request_id)
                waited = self.without_token.pop(request_id, None) is not None
                if waited and record.output_tokens:
                    record.first_token_step = self.step_id
                self._file.append(record)
        except Exception:
            self._give_up()
        if args or kwargs:
            return self._free(request, *args, **kwargs)
        return self._free(request)

    def _begin_file(self) -> RecordFile:
        schema = "kvtax.engine_request/1"
        return RecordFile(
            self._life, "engine_request", schema, self._header, self._finished
        )

    def _note_first_step(self, step_id: int, request_id: str) -> None:
        record = self._open.get(request_id)
        request = self._scheduler.requests.get(request_id)
        if record is None or request is None:
            return
        if record.first_step is not None:
            # The V2 model runner gets a resumed request as a new one.
            self._note_resumed(step_id, record)
            return
        record.first_step = step_id
        self.without_token[request_id] = request
        # From 0.20 on in PrefillStats, until the first output takes it.
        stats = getattr(request, "prefill_stats", None)
        if stats is not None:
            record.cached_tokens = stats.num_local_cached_tokens
            record.external_tokens = stats.num_external_cached_tokens
        elif hasattr(request, "num_external_computed_tokens"):
            record.external_tokens = request.num_external_computed_tokens
            record.cached_tokens = request.num_cached_tokens - record.external_tokens

    def _note_resumed(self, step_id: int, record: RequestRecord | None) -> None:
        steps = record.preempted_steps if record is not None else None
        if steps is not None and len(steps) % 2:
            steps.append(step_id)

    def _note_waits(self) -> None:
        """Note the requests that got blocks in this step and wait for their KV."""
        for request, t_ns in self.with_external_kv:
            request_id = request.request_id
            record = self._open.get(request_id)
            waits = request.status.name == "WAITING_FOR_REMOTE_KVS"
            if record is not None and waits and request_id not in self.waiting_for_kv:
                self.waiting_for_kv.add(request_id)
                record.kv_wait_ns = [*(record.kv_wait_ns or ()), t_ns]
        self.with_external_kv.clear()

    def _header(self) -> dict[str, Any]:
        """Return the header's fields of ids, and write their key beside the file."""
        if self._plain_ids:
            return {"ids": "plain"}
        folder = LifeFolder(records_directory() / self._life)
        folder.write_once(KEY_FILE, self._key.hex().encode())
        return {"ids": "keyed"}

    def _finished(self, record: RequestRecord) -> RequestRecord:
        """Finish a record, away from the engine's thread."""
        record.id = self._name(record.id)
        if record.before_engine_us is not None:
            record.before_engine_us = max(record.before_engine_us, 0.0)
        if record.finish_reason is not None:
            record.finish_reason = str(record.finish_reason)
            if record.finish_reason == "abort":
                # Between two steps.
                record.last_step = None
        return record

    def _name(self, request_id: str) -> str:
        name = _SUFFIX.sub("", request_id)
        if self._plain_ids:
            return name
        return hashlib.blake2b(name.encode(), digest_size=8, key=self._key).hexdigest()
