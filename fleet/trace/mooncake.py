# SPDX-License-Identifier: Apache-2.0
"""Read Mooncake's FAST'25 traces: a line is a request, and sessions are not recorded.

Every request is a session of one turn. Schema: github.com/kvcache-ai/Mooncake,
FAST25-release/traces.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fleet.trace.lines import Lines
from fleet.trace.request import BlockHash, Count, Positive, Request, Seconds

BLOCK_TOKENS = 512  # the traces do not name it


class Row(msgspec.Struct):
    """A line."""

    timestamp: Seconds  # milliseconds
    input_length: Positive
    output_length: Count
    hash_ids: list[BlockHash]


_ROW = msgspec.json.Decoder(Row)


def read(
    lines: Lines, rows: Iterator[bytes], block_tokens: int = BLOCK_TOKENS
) -> Iterator[Request]:
    """The requests of a trace.

    Raises:
        TraceError: a line is not what it should be.
    """
    for number, line in enumerate(rows):
        row = lines.decode(_ROW, line)
        yield Request(
            arrival_s=row.timestamp / 1e3,
            session=str(number),
            turn=0,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            hashes=row.hash_ids,
            block_tokens=block_tokens,
        )
