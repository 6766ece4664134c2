# SPDX-License-Identifier: Apache-2.0
"""Read Qwen-Bailian's traces: a line is a request that may continue another one.

A session is a chain of `parent_chat_id`, named by the chat it began with. A second
answer to the same chat begins a session of its own, whose parent is the first's; so
does a chat whose parent the file does not have. `turn` is counted anew for that reason.

The trace does not record how long an answer took: a think time is the time since the
turn before was sent, which contains it. Ids need not extend those of the turn before:
chat templates drop thinking tokens, and the last block's padding gets filled.

Schema: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from fleet.trace.lines import Lines
from fleet.trace.request import BlockHash, Count, Positive, Request, Seconds

BLOCK_TOKENS = 16  # the file names say so: _blksz_16


class Row(msgspec.Struct):
    """A line; `type` (text, search, image, file) and `turn` are not needed."""

    chat_id: int
    timestamp: Seconds
    input_length: Positive
    output_length: Count
    hash_ids: list[BlockHash]
    parent_chat_id: int = -1  # none


_ROW = msgspec.json.Decoder(Row)


class _Chat(NamedTuple):
    """What a later chat needs to know of this one."""

    session: str
    turn: int
    arrival_s: float


def read(
    lines: Lines, rows: Iterator[bytes], block_tokens: int = BLOCK_TOKENS
) -> Iterator[Request]:
    """The requests of a trace. Memory: some 300 bytes per request, for its children.

    Raises:
        TraceError: a line is not what it should be.
    """
    chats: dict[int, _Chat] = {}
    continued: set[int] = set()
    for line in rows:
        row = lines.decode(_ROW, line)
        if row.chat_id in chats:
            raise lines.error(f"chat_id {row.chat_id} is there twice: rename one")
        before = chats.get(row.parent_chat_id)
        think_s = parent = None
        if before is None or row.parent_chat_id in continued:
            chat = _Chat(str(row.chat_id), 0, row.timestamp)
            parent = before and before.session
        else:
            continued.add(row.parent_chat_id)
            chat = _Chat(before.session, before.turn + 1, row.timestamp)
            think_s = max(0.0, row.timestamp - before.arrival_s)
        chats[row.chat_id] = chat
        yield Request(
            arrival_s=row.timestamp,
            session=chat.session,
            turn=chat.turn,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hashes=row.hash_ids,
            block_tokens=block_tokens,
            think_s=think_s,
            parent=parent,
        )
