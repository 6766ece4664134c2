# SPDX-License-Identifier: Apache-2.0
"""Prompts from block hashes: equal ids give equal tokens, other ids other tokens.

A replayed trace finds in a server's prefix cache what the recorded one found.
A block is its id, spread over 64 bits one to one and written as the digits of the first
tokens: no two ids share a block. The rest of a block is pseudo-random. Nothing but the
arguments goes in: all processes agree.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtax_fleet.trace.request import Request, length_problem
from kvtax_fleet.trace.reuse import GOLDEN, mix


def prompt(request: Request, vocab_size: int) -> NDArray[Any]:
    """Make the token ids of a prompt, int32, [input_tokens], each in [1, vocab_size).

    Tokens that no hash covers are those of this session and turn alone.

    Raises:
        ValueError: blocks have fewer tokens than it takes to tell 2^64 ids apart, or
            the hashes do not cover the prompt to within one block.
    """
    size = request.block_tokens
    digits = _digits(vocab_size, size)
    if problem := length_problem(len(request.hashes), size, request.input_tokens):
        raise ValueError(f"{request.session}/{request.turn}: {problem}")
    ids = np.array(request.hashes, np.uint64)
    if len(ids) * size < request.input_tokens:
        name = f"{request.session}/{request.turn}".encode()
        tail = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        # Ids are below 2^63: no block is a tail.
        ids = np.append(ids, np.uint64(tail | 1 << 63))
    return _blocks(mix(ids), size, digits, vocab_size).ravel()[: request.input_tokens]


def _digits(vocab_size: int, block_tokens: int) -> int:
    """Count the tokens that write a 64-bit number."""
    base = vocab_size - 1
    digits = next((n for n in range(1, 65) if base**n >= 1 << 64), None)
    if digits is None or digits > block_tokens:
        raise ValueError(
            f"blocks of {block_tokens} tokens out of {vocab_size} cannot tell 2^64 ids "
            "apart: take a bigger vocabulary or block size"
        )
    return digits


def _blocks(
    seeds: NDArray[Any], size: int, digits: int, vocab_size: int
) -> NDArray[Any]:
    base = np.uint64(vocab_size - 1)
    x = seeds[:, None] + GOLDEN * np.arange(size, dtype=np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    # Its high half as a fraction of 2^32 times the range: evenly over the range.
    tokens = (((x >> np.uint64(32)) * base) >> np.uint64(32)).astype(np.int32)
    rest, lowest = seeds, seeds % base
    for digit in range(digits - 1):
        rest, tokens[:, digit] = rest // base, rest % base
    # The highest digit is small; the lowest, known by then, makes it any.
    tokens[:, digits - 1] = (rest + lowest) % base
    made: NDArray[Any] = tokens + np.int32(1)
    return made
