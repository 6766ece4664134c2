# SPDX-License-Identifier: Apache-2.0
"""Heads of requests and answers, as both sides read and write them.

Bytes of a head are characters of Latin-1, so that what is sent on is what came.
"""

from __future__ import annotations

from multidict import MultiMapping

# llhttp itself sets no limit. aiohttp and uvicorn take as much, or less.
MAX_HEAD_BYTES = 1 << 16


def written(first_line: str, headers: MultiMapping[str], *own: str) -> bytes:
    """A head to the blank line after it. `own`: lines beside the headers."""
    lines = [first_line, *[f"{name}: {value}" for name, value in headers.items()]]
    lines += [*own, "\r\n"]
    return "\r\n".join(lines).encode("latin-1", "replace")
