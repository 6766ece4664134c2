# SPDX-License-Identifier: Apache-2.0
"""engine_request.jsonl: what became of each request inside the engine.

The patch request_timing writes it inside vLLM, beside engine_step.jsonl. A request
joins its steps by their `step_id`. What never happened to it is absent.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from lab.records.lines import Lines, read_lines
from lab.records.step_table import older_part
from lab.records.steps import FileHeader


class EngineRequestHeader(FileHeader, tag_field="schema", tag="kvtax.engine_request/1"):
    """Header; written by the engine core."""

    ids: str = "hashed"
    """`hashed`: ids are 16 hexadecimal digits of BLAKE2b; `plain`: as the server has
    them."""


class EngineRequest(msgspec.Struct, omit_defaults=True):
    """One request; written when it ended, or when the engine did."""

    id: str
    """Of the client's id as the server knows it; a client may repeat one."""
    arrival_ns: int
    """When the scheduler got it."""
    prompt_tokens: int
    """Tokens of the prompt."""
    before_engine_us: float | None = None
    """From its arrival at the server to `arrival_ns`, by the wall clock."""
    first_step: int | None = None
    """`step_id` in which it was first scheduled; absent if it never was."""
    first_token_step: int | None = None
    """`step_id` whose end brought its first token."""
    last_step: int | None = None
    """`step_id` in which it ended; absent if it ended between two."""
    finished_ns: int | None = None
    """When it ended; absent if it had not when the engine stopped."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error` or `repetition`."""
    cached_tokens: int | None = None
    """Prompt tokens found in this instance's prefix cache."""
    external_tokens: int | None = None
    """Prompt tokens that the connector brought."""
    output_tokens: int = 0
    """Tokens generated."""
    preemptions: int = 0
    """How often it was preempted."""
    preempted_steps: list[int] = []
    """`step_id` in which it was preempted and in which it went on, in turn."""
    kv_wait_ns: list[int] = []
    """When it began to wait for KV from elsewhere, and when that had come, in turn."""


def read_engine_requests(path: Path) -> Lines[EngineRequestHeader]:
    """All requests of a file and its older part, in the order in which they ended.

    Raises RecordsError.
    """
    found = read_lines(path, EngineRequestHeader, EngineRequest)
    if older_part(path).is_file():
        older = read_lines(older_part(path), EngineRequestHeader, EngineRequest)
        found.records[:0] = older.records
    return found


def ids_of_completion(x_request_id: str) -> tuple[str, str]:
    """The `id` of a completion whose client sent this header: plain, and hashed.

    vLLM names it `cmpl-<header>-<number of the prompt>`, and one prompt is number 0
    (`create_completion` in 0.18.1 to 0.33.0). What vLLM adds to make ids unique, the
    patch has cut off.
    """
    name = f"cmpl-{x_request_id}-0"
    return name, hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
