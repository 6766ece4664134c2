# SPDX-License-Identifier: Apache-2.0
"""Records of requests: by the driver, by the replayer, and inside the engine.

requests.jsonl has the phases of a trial and the outcome of each request, replay.jsonl
the requests of a replayed trace, engine_request.jsonl what became of each in vLLM.

Driver and replayer share `RequestOutcome` and `Account`. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from kvtax.records import RecordsError
from kvtax.records.files import Lines, read_lines
from kvtax.records.parts import parts_of
from kvtax.records.steps import FileHeader, Natural, another_life


class Phase(IntEnum):
    """The cache grows under load, and stays full; then it is filled and held at levels.

    The levels of a pass come in random order; the prefix cache is reset before a lower
    one. Behind one hold of each pass, at the lowest and at the highest level in turn, a
    short request comes after a second of idleness, then prompts that hit the prefix
    cache, then long prompts, which evict blocks where the cache is full.
    """

    GROWTH = 0
    PLATEAU = 1
    FILL = 2
    HOLD = 3
    AFTER_IDLE = 4
    HIT = 5
    LONG = 6

    @property
    def label(self) -> str:
        """The name that plans and request records use."""
        return self.name.lower()

    def at(self, number: int, level: int, decoders: int) -> str:
        """Return the name of the phase of the `number`-th hold, at a level from 0."""
        return f"{self.label}.{number}.{level}.{decoders}"

    @classmethod
    def of(cls, name: str) -> Phase | None:
        """Return the phase that a file means by `name`; None for another name."""
        label = name.partition(".")[0]
        return next((phase for phase in cls if phase.label == label), None)


# Requests of each event behind a hold.
EVENT_REQUESTS = {Phase.AFTER_IDLE: 1, Phase.HIT: 2, Phase.LONG: 2}
# End of the name of the phase that starts the requests which decode in a hold.
DECODERS = ".decoders"


class Place(NamedTuple):
    """Place of a hold: its number, its level, and how many requests decode in it."""

    number: int
    level: int
    decoders: int


def place_of(name: str) -> Place:
    """Return the place in the name of a phase; 0 is what it does not say."""
    numbers = [int(part) for part in name.split(".")[1:] if part.isdecimal()]
    return Place(*[*numbers, 0, 0, 0][:3])


class RequestOutcome(msgspec.Struct, kw_only=True):
    """RequestOutcome of a request; the sender fills it in step by step."""

    status: Literal["ok", "failed", "cancelled"] | None = None
    """How it ended; no line is written before it has."""
    error: str | None = None
    """Why it is not ok."""
    http_status: int | None = None
    """Of the answer; null if there was none."""
    intended_ns: int | None = None
    """When it was due; null if that never came."""
    sent_ns: int | None = None
    """When the first byte of the body was handed to the socket."""
    first_token_ns: int | None = None
    """First event with tokens."""
    end_ns: int | None = None
    """Last event with tokens; of a request that is not ok, when it was given up."""


class Account(msgspec.Struct, kw_only=True):
    """The sender's own account of a run: its last line, absent if it was killed."""

    scheduled: int
    """Requests that were to be sent."""
    ok: int
    """Requests with a whole answer."""
    failed: int
    """Requests with an error, or without a whole answer."""
    cancelled: int
    """Requests that were given up or never sent."""
    lag_ms: dict[str, float] | None = None
    """`p50`, `p90`, `p99`, `max` of actual less intended send; null if nothing was
    sent."""
    lag_budget_ms: float | None = None
    """What p99 of the lag may be."""
    valid: bool | None = None
    """Whether p99 of the lag is within its budget."""


class RequestsHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.requests/1"
):
    """Header; written by the driver before the first request."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    plan: Any = None
    """What was to be sent: `kvtax/load/plan.py`."""
    scheduled: int
    """Number of requests of the plan."""


class PhaseStart(msgspec.Struct, omit_defaults=True, tag_field="type", tag="phase"):
    """Start of a phase."""

    name: str
    """`growth`, `plateau`; `fill.N.L.D` and `hold.N.L.D`: the N-th hold, at level L,
    with D requests that decode; `after_idle.N.L.D`, `hit.N.L.D` and `long.N.L.D`: what
    follows that hold."""
    start_ns: int
    """When its first request may be due."""
    reset_ns: int | None = None
    """When `/reset_prefix_cache` answered OK; of the first phase after it only."""
    probe_ns: int | None = None
    """When the driver began to probe the cache for that reset. Steps from then to the
    reset belong to no phase."""


class CpuReading(msgspec.Struct, omit_defaults=True, tag_field="type", tag="cpu"):
    """CPU time and memory of the server; read at the edges of each hold."""

    t_ns: int
    """When it was read."""
    ns: int
    """That of all of them since they began, and of those that ended."""
    threads: dict[int, int]
    """That of each living thread that has any, in ns by its id."""
    anonymous_kib: int | None = None
    """Memory of all processes that no file holds, each by itself."""
    waited_ns: dict[int, int] = {}
    """For so long each thread had work and no core, by its id."""


class RequestRecord(RequestOutcome, tag_field="type", tag="request"):
    """RequestOutcome of one scheduled request; a moment that never came is null."""

    id: int
    """Counts from 0 in the order of the plan; sent as `X-Request-Id`."""
    phase: str
    """The phase that it belongs to."""
    prompt_tokens: Natural
    """Tokens of the prompt."""
    output_tokens: Natural | None = None
    """Generated tokens, by the server's usage."""


class DriverEnd(Account, kw_only=True, tag_field="type", tag="end"):
    """The driver's account; the last line, absent if the driver was killed."""

    driver_cpu_s: float | None = None
    """CPU time of the driver from the first request on."""


RequestsLine = PhaseStart | CpuReading | RequestRecord | DriverEnd


@dataclass(frozen=True)
class Requests:
    """The content of one requests.jsonl."""

    scheduled: int
    phases: list[PhaseStart]
    cpu: list[CpuReading]
    requests: list[RequestRecord]
    end: DriverEnd | None
    torn_lines: int


def read_requests(path: Path) -> Requests:
    """Read phases, CPU times, requests and the account. Raises RecordsError."""
    lines = read_lines(path, RequestsHeader, RequestsLine)
    records = lines.records
    ends = [record for record in records if isinstance(record, DriverEnd)]
    return Requests(
        scheduled=lines.header.scheduled,
        phases=[record for record in records if isinstance(record, PhaseStart)],
        cpu=[record for record in records if isinstance(record, CpuReading)],
        requests=[record for record in records if isinstance(record, RequestRecord)],
        end=ends[-1] if ends else None,
        torn_lines=lines.torn_lines,
    )


class EngineRequestHeader(FileHeader, tag_field="schema", tag="kvtax.engine_request/1"):
    """Header; written by the engine core."""

    ids: str = "hashed"
    """`keyed`: ids are 16 hexadecimal digits of BLAKE2b with the key of the life, in
    `request_ids.key` beside the file; `hashed`, in older files: without a key; `plain`:
    as the server has them."""


# What a column of 64 bits can hold; any other number is a damaged line.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class EngineRequest(msgspec.Struct, omit_defaults=True, gc=False):
    """One request; written when it ended, or when the engine did."""

    id: str
    """Of the client's id as the server knows it; a client may repeat one."""
    arrival_ns: Whole
    """When the scheduler got it."""
    prompt_tokens: Whole
    """Tokens of the prompt."""
    before_engine_us: float | None = None
    """From its arrival at the server to `arrival_ns`, by the wall clock."""
    first_step: Whole | None = None
    """`step_id` in which it was first scheduled; absent if it never was."""
    first_token_step: Whole | None = None
    """`step_id` whose end brought its first token."""
    last_step: Whole | None = None
    """`step_id` in which it ended; absent if it ended between two."""
    finished_ns: Whole | None = None
    """When it ended; absent if it had not when the engine stopped."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error` or `repetition`."""
    cached_tokens: Whole | None = None
    """Prompt tokens found in this instance's prefix cache."""
    external_tokens: Whole | None = None
    """Prompt tokens that the connector brought."""
    output_tokens: Whole = 0
    """Tokens generated."""
    preemptions: Whole = 0
    """How often it was preempted."""
    preempted_steps: list[Whole] = []
    """`step_id` in which it was preempted and in which it went on, in turn."""
    kv_wait_ns: list[Whole] = []
    """When it began to wait for KV from elsewhere, and when that had come, in turn."""


def read_engine_requests(
    path: Path, strict: bool = True, step: int = 1
) -> Lines[EngineRequestHeader]:
    """Read every `step`-th request of a file and its older part, as they ended.

    Raises RecordsError. If not `strict`, bad lines and what is no part of this file are
    left out, as long as a part is left.
    """
    read: list[Lines[EngineRequestHeader]] = []
    bad: list[RecordsError] = []
    for part in reversed(parts_of(path)):
        try:
            lines = read_lines(
                part, EngineRequestHeader, EngineRequest, strict=strict, step=step
            )
            if read and (why := another_life(read[0].header, lines.header)):
                raise RecordsError(f"{part}: {why}")
            read.append(lines)
        except RecordsError as error:
            bad.append(error)
    if bad and (strict or not read):
        raise bad[0]
    return Lines(
        read[0].header,
        [record for part in reversed(read) for record in part.records],
        sum(part.torn_lines for part in read),
        [*map(str, bad), *(line for part in reversed(read) for line in part.bad)],
    )


def ids_of_completion(x_request_id: str) -> tuple[str, str]:
    """Compute the `id` of a completion whose client sent this header: plain and hashed.

    vLLM names it `cmpl-<header>-<number of the prompt>`, and one prompt is number 0
    (`create_completion` in 0.18.1 to 0.33.0). What vLLM adds to make ids unique, the
    patch has cut off.
    """
    name = f"cmpl-{x_request_id}-0"
    return name, hashed_id(name)


def hashed_id(name: str, key: bytes = b"") -> str:
    """Hash an id of the server's as the recorder does."""
    return hashlib.blake2b(name.encode(), digest_size=8, key=key).hexdigest()


def key_of_ids(life: Path) -> bytes:
    """Read the key of a life's request ids; empty where there is none."""
    try:
        return bytes.fromhex((life / "request_ids.key").read_text())
    except (OSError, ValueError):
        return b""


# What stays as it is, beside letters and digits.
_IN_HEADER = " /:;,.@+=~#!$&'()*|?[]"


def in_header(name: str) -> str:
    """Encode a session's or a request's name for a header."""
    return quote(name, safe=_IN_HEADER)


class ReplayHeader(
    msgspec.Struct, kw_only=True, tag_field="schema", tag="kvtax.replay/1"
):
    """Header; written by the replayer before the first request."""

    clock: str = "CLOCK_MONOTONIC"
    """The clock of all `_ns`."""
    load: str | None = None
    """Open or closed loop, in words."""
    options: Any = None
    """The options as resolved: `kvtax_fleet/replay/options.py`."""
    model: str | None = None
    """The requested model."""
    max_model_len: int | None = None
    """The longest request that the server takes; null if it does not say."""
    scheduled: int = 0
    """Requests of the trace."""
    sessions: int = 0
    """Sessions of the trace."""
    trace_sha256: str | None = None
    """Of the trace's file."""


class ReplayedRequest(RequestOutcome, tag_field="type", tag="request"):
    """RequestOutcome of one request of the trace; one line each, as they ended."""

    id: str
    """`<session>/<turn>`, unique; sent as `X-Request-Id`, percent-quoted where a
    header needs it."""
    session: str
    """As the trace has it."""
    turn: int
    """Counts from 0 in its session."""
    arrival_s: float | None = None
    """Arrival in the trace. A session's first turn is due then, or later, when a slot
    is free; in a closed loop when a slot is free. A later turn is due `think_s` after
    `end_ns` of the turn before. The time scale divides both times."""
    input_tokens: int | None = None
    """Requested prompt tokens."""
    output_tokens: int | None = None
    """Requested output tokens, at least 1."""
    instance: str | None = None
    """The answer's `X-Kvtax-Instance`."""
    prefill_instance: str | None = None
    """The answer's `X-Kvtax-Prefill`."""
    usage_prompt_tokens: Natural | None = None
    """The server's count; the request is `failed` if it differs from the request."""
    usage_completion_tokens: Natural | None = None
    """The server's count; the request is `failed` if it differs from the request."""
    cached_tokens: int | None = None
    """Prompt tokens that were not computed; null if the server does not say."""


class Steady(msgspec.Struct):
    """The time in which the load neither rose nor ran out."""

    start_ns: int
    """Requests due from here on belong to it."""
    end_ns: int
    """Requests due from here on do not."""


class ReplayEnd(Account, kw_only=True, tag_field="type", tag="end"):
    """The replayer's account; the last line, absent if the replayer was killed."""

    steady: Steady | None = None
    """The steady window; null if a signal stopped the replay, or nothing is left."""
    held_sessions: int = 0
    """Sessions of an open loop that found all slots taken when they arrived."""
    held_s_max: float = 0.0
    """The longest that one of them waited for a slot; its latency does not count it."""
    replay_cpu_s: float | None = None
    """CPU time of the replayer."""
