# SPDX-License-Identifier: Apache-2.0
"""A request of a trace, and what makes one wrong."""

from __future__ import annotations

from typing import Annotated

import msgspec

# Ids go through numpy's int64.
BlockHash = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class TraceError(Exception):
    """A trace cannot be read or made: file, line, reason, remedy."""

    exit_code = 2


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt.

    `hashes` names its blocks of `block_tokens`, head first: equal ids are equal blocks
    behind equal prefixes, in the whole trace. They cover `input_tokens` to within one
    block; the last block may be partial.

    `think_s` is the time from the answer to the turn before until this turn is sent,
    None in a session's first turn. `parent` is the session that started this one (a
    sub-agent, a fork).
    """

    arrival_s: Seconds  # since the trace began
    session: str
    turn: Count  # 0, 1, ... within the session
    input_tokens: Positive
    output_tokens: Count
    hashes: list[BlockHash]
    block_tokens: Positive
    think_s: Seconds | None = None
    parent: str | None = None


def length_problem(blocks: int, block_tokens: int, input_tokens: int) -> str | None:
    """Explain why blocks cannot be those of a prompt; None if they can.

    With another block size than the trace's every prompt would be too short or too
    long, and nothing else would tell.
    """
    covered = blocks * block_tokens
    if abs(covered - input_tokens) <= block_tokens:
        return None
    return (
        f"{blocks} blocks of {block_tokens} tokens are {covered} tokens, but the input "
        f"length is {input_tokens}: wrong block size (--block-tokens), or a damaged "
        "record"
    )
