# SPDX-License-Identifier: Apache-2.0
"""What a store says of a piece that it holds."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """The manifest of a piece.

    `file` is the name of its tar, beside the manifest; `work` the hash of what was
    asked for, `host` who made it.
    """

    work: str
    host: str
    put_at: str
    file: str
    bytes: int
    sha256: str
