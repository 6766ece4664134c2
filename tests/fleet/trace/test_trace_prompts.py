# SPDX-License-Identifier: Apache-2.0
"""Prompts hit in a cache of tokens what their hashes hit in a cache of hashes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.trace import Request
from fleet.trace.prompts import prompt

SMALLEST_BLOCK = {32_000: 5, 257: 8, 5: 32, 3: 64, 152_064: 4}
ids = st.integers(0, 2**63 - 1)


def request(hashes: list[int], input_tokens: int, block_tokens: int, **more) -> Request:
    where = {"session": "s", "turn": 0} | more
    return Request(
        0.0, where["session"], where["turn"], input_tokens, 1, hashes, block_tokens
    )


def common(a: list, b: list) -> int:
    """The length of the longest common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Request], int]:
    """Prompts of few ids, with partial last blocks and tails, and a vocabulary."""
    vocab_size = draw(st.sampled_from(sorted(SMALLEST_BLOCK)))
    size = SMALLEST_BLOCK[vocab_size] + draw(st.integers(0, 8))
    some = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    requests = []
    for turn in range(draw(st.integers(2, 6))):
        hashes = draw(st.lists(st.sampled_from(some), max_size=6))
        length = len(hashes) * size + draw(st.integers(-size, size))
        if length > 0:
            requests.append(request(hashes, length, size, turn=turn))
    return requests, vocab_size


@settings(deadline=None)
@given(traces())
def test_prefix_hits_of_tokens_are_those_of_hashes(trace):
    requests, vocab_size = trace
    for one in requests:
        for other in requests:
            if one is other:
                continue
            size = one.block_tokens
            full = min(one.input_tokens, other.input_tokens) // size
            by_hash = min(common(one.hashes, other.hashes), full)
            tokens = [prompt(each, vocab_size).tolist() for each in (one, other)]
            assert common(*tokens) // size == by_hash


@settings(deadline=None)
@given(st.lists(ids, max_size=5), st.integers(1, 40), st.integers(2, 200_000))
def test_a_prompt_has_its_length_and_real_tokens(hashes, offset, vocab_size):
    length = len(hashes) * 64 + offset - 20
    if length < 1 or vocab_size < 3:
        return
    tokens = prompt(request(hashes, length, 64), vocab_size)
    assert (tokens.dtype, tokens.shape) == (np.int32, (length,))
    assert tokens.min() >= 1
    assert tokens.max() < vocab_size


def test_tokens_use_the_whole_vocabulary_evenly():
    tokens = prompt(request(list(range(2000)), 128_000, 64), 1001)
    counts = np.bincount(tokens, minlength=1001)[1:]
    # 128 a token; of 1,000 Poisson counts none is 6 standard deviations off.
    assert counts.min() > 128 - 6 * 128**0.5
    assert counts.max() < 128 + 6 * 128**0.5


@pytest.mark.parametrize("vocab_size", SMALLEST_BLOCK)
def test_neighbouring_ids_have_other_blocks_even_where_blocks_are_smallest(vocab_size):
    size = SMALLEST_BLOCK[vocab_size]
    tokens = prompt(request(list(range(5000)), 5000 * size, size), vocab_size)
    assert len(np.unique(tokens.reshape(5000, size), axis=0)) == 5000
    with pytest.raises(ValueError, match="bigger vocabulary"):
        prompt(request([1], size - 1, size - 1), vocab_size)


def test_a_tail_is_that_of_its_session_and_turn():
    def tail(**where) -> list[int]:
        return prompt(request([1], 128, 64, **where), 32_000)[64:].tolist()

    tails = [tail(), tail(turn=1), tail(session="t"), tail(session="s/0", turn=1)]
    assert len({tuple(each) for each in tails}) == 4
    assert tail() == tails[0]


def test_a_prompt_its_hashes_do_not_cover_is_refused():
    with pytest.raises(ValueError, match="s/0: 1 blocks of 16 tokens are 16"):
        prompt(request([1], 33, 16), 32_000)


def test_every_process_makes_the_same_prompt():
    made = prompt(request([0, 5, 2**63 - 1], 200, 64), 32_000)
    digest = hashlib.sha256(made.astype("<i4").tobytes()).hexdigest()
    script = (
        "import hashlib; from fleet.trace import Request; "
        "from fleet.trace.prompts import prompt; "
        "r = Request(9.0, 's', 0, 200, 7, [0, 5, 2**63 - 1], 64, 1.0, 'p'); "
        "print(hashlib.sha256(prompt(r, 32_000).astype('<i4').tobytes()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == digest
    # Recorded runs stay comparable: the same tokens in every version.
    assert digest.startswith("22aacc47820155eb")
