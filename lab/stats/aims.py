# SPDX-License-Identifier: Apache-2.0
"""Aims for what is measured, and whether a measurement meets them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from lab.stats.interval import Interval
from lab.stats.markdown import table

Judgement = Literal["met", "missed", "undecided"]

MARKDOWN: dict[Judgement, str] = {
    "met": "**met**",
    "missed": "**missed**",
    "undecided": "**undecided** in this run",
}


class HasInterval(Protocol):
    """An `Estimate` or an `Interval`."""

    @property
    def ci95(self) -> tuple[float, float]: ...


class Aim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most or the least that something is meant to be.

    what: what is measured, such as "get_finished p50".
    at_most, at_least: the bound, which is within the aim; exactly one is given.
    unit: of the bound: "us", or "x no-op" for a ratio; empty for a plain number.
    whose: who set the aim, such as "ours" or "the vLLM RFC's".

    Raises ValueError unless there is exactly one bound; read from a file by msgspec
    it is a ValidationError.
    """

    what: str
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""
    whose: str = "ours"

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("an aim has either at_most or at_least")

    @property
    def bound(self) -> str:
        """`at most 3 us`."""
        if self.at_most is not None:
            return f"at most {self.at_most:.4g} {self.unit}".rstrip()
        return f"at least {self.at_least:.4g} {self.unit}".rstrip()

    def __str__(self) -> str:
        """`engine hooks: at most 3 us (ours)`."""
        return f"{self.what}: {self.bound} ({self.whose})"


def judge(estimate: HasInterval, aim: Aim) -> Judgement:
    """Met if the whole 95 % interval is within the aim, missed if all of it is not."""
    low, high = estimate.ci95
    if aim.at_most is not None:
        within, outside = high <= aim.at_most, low > aim.at_most
    else:
        within, outside = low >= aim.at_least, high < aim.at_least
    if within:
        return "met"
    return "missed" if outside else "undecided"


def aims_table(found: Iterable[tuple[Aim, Interval]], spec: str) -> str:
    """A Markdown table; `spec` is the format of the numbers found, such as `.1f`."""
    rows = [
        [aim.what, aim.bound, aim.whose, f"{interval:{spec}}", judge(interval, aim)]
        for aim, interval in found
    ]
    return table(["what", "aim", "whose", "found", ""], rows)
