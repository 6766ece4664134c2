# SPDX-License-Identifier: Apache-2.0
"""engine_request.jsonl: what became of each request inside the engine.

The recorder writes it inside vLLM, beside engine_step.jsonl. A request
joins its steps by their `step_id`. What never happened to it is absent.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from kvtax.records import RecordsError
from kvtax.records.files import Lines, read_lines
from kvtax.records.parts import parts_of
from kvtax.records.steps import FileHeader, another_life


class EngineRequestHeader(FileHeader, tag_field="schema", tag="kvtax.engine_request/1"):
    """Header; written by the engine core."""

    ids: str = "hashed"
    """`hashed`: ids are 16 hexadecimal digits of BLAKE2b; `plain`: as the server has
    them."""


# What a column of 64 bits can hold; any other number is a damaged line.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class EngineRequest(msgspec.Struct, omit_defaults=True):
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


def read_engine_requests(path: Path, strict: bool = True) -> Lines[EngineRequestHeader]:
    """All requests of a file and its older part, in the order in which they ended.

    Raises RecordsError. If not `strict`, bad lines and what is no part of this file are
    left out, as long as a part is left.
    """
    read: list[Lines[EngineRequestHeader]] = []
    bad: list[RecordsError] = []
    for part in reversed(parts_of(path)):
        try:
            lines = read_lines(part, EngineRequestHeader, EngineRequest, strict=strict)
            if read and (why := another_life(read[0].header, lines.header)):
                raise RecordsError(f"{part}: {why}")
            read.append(lines)
        except RecordsError as error:
            bad.append(error)
    if bad and (strict or not read):
        raise bad[0]
    return Lines(
        read[0].header,
        [record for one in reversed(read) for record in one.records],
        sum(one.torn_lines for one in read),
        [*map(str, bad), *(line for one in reversed(read) for line in one.bad)],
    )


def ids_of_completion(x_request_id: str) -> tuple[str, str]:
    """Compute the `id` of a completion whose client sent this header: plain and hashed.

    vLLM names it `cmpl-<header>-<number of the prompt>`, and one prompt is number 0
    (`create_completion` in 0.18.1 to 0.33.0). What vLLM adds to make ids unique, the
    patch has cut off.
    """
    name = f"cmpl-{x_request_id}-0"
    return name, hashed_id(name)


def hashed_id(name: str) -> str:
    """Hash an id of the server's as the recorder does."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
