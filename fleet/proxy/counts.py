# SPDX-License-Identifier: Apache-2.0
"""What one worker has counted, and several together: what /metrics is written from.

Loads are not in here: each worker knows those of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from .core import Core
from .kvindexd import Kvindexd
from .tokens import Tokens


class Counts(msgspec.Struct):
    """`ended` is (instance, status, requests). `mirror_tokens`, `differences` and
    `difference_tokens` are by instance, in their order.
    """

    ejected: set[str]
    ended: list[tuple[str | None, str, int]]
    untokenized: dict[str, int]
    ejections: int
    failed_open: int
    unanswered: int
    mirror_tokens: list[float]
    differences: list[int]
    difference_tokens: list[int]
    decision_us: list[float]

    @classmethod
    def of(cls, core: Core, tokens: Tokens, exact: Kvindexd | None) -> Counts:
        router = core.router
        return cls(
            core.health.ejected,
            [(*key, number) for key, number in core.handler.ended.items()],
            tokens.unknown,
            core.health.ejections,
            core.handler.failed_open,
            0 if exact is None else exact.unanswered,
            core.mirror.tokens,
            router.differences,
            router.difference_tokens,
            list(router.decision_us),
        )


def together(workers: Sequence[Counts]) -> Counts:
    """All that they have counted. An instance is ejected if one has ejected it."""
    ended: Counter[tuple[str | None, str]] = Counter()
    untokenized: Counter[str] = Counter()
    for one in workers:
        ended.update({(name, status): n for name, status, n in one.ended})
        untokenized.update(one.untokenized)
    return Counts(
        set[str]().union(*(one.ejected for one in workers)),
        [(*key, number) for key, number in ended.items()],
        untokenized,
        sum(one.ejections for one in workers),
        sum(one.failed_open for one in workers),
        sum(one.unanswered for one in workers),
        _sums([one.mirror_tokens for one in workers]),
        _sums([one.differences for one in workers]),
        _sums([one.difference_tokens for one in workers]),
        [us for one in workers for us in one.decision_us],
    )


def _sums(rows: list[list]) -> list:
    return list(map(sum, zip(*rows, strict=True)))
