# SPDX-License-Identifier: Apache-2.0
"""Servers side by side: equal ones are one card, the one with the largest cost first.

A card keeps no record: what page and terminal show of it is made when it is added, so
that memory does not grow with the number of servers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvtax.look.answer import added_cost, answer, patches_of
from kvtax.look.discover import Clock
from kvtax.look.instance_summary import Cost, InstanceSummary
from kvtax.look.tables import tables
from kvtax.look.time_line import time_line
from kvtax.report.document import Bar, Bars, Cell, Group, Section, Table, Words

# Two servers are equal whose steps and connectors take as long, to a fifth or 5 us.
EQUAL_SHARE, EQUAL_US = 0.2, 5.0
# Cards that are shown at once, and those of which page and terminal show all.
SHOWN, DETAILED = 3, 12
# Names of equal servers that a card shows.
NAMES = 3
INTERVALS, REQUESTS = 1_000, 4_000
PARTS = ("model", "scheduler", "connector", "the rest")
UNIT = "µs per step"


@dataclass
class Card:
    """Servers whose steps are alike: their names, and what is shown of the first."""

    facts: tuple[object, ...]
    bar: dict[str, float]
    share: float
    is_added: bool
    paragraphs: list[str]
    sections: list[Section]
    row: list[Cell]
    names: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)

    def is_like(self, facts: tuple[object, ...], bar: dict[str, float]) -> bool:
        """Decide whether a server with this bar is one of the card's."""
        return self.facts == facts and all(
            abs(self.bar[name] - bar[name])
            <= max(EQUAL_US, EQUAL_SHARE * max(self.bar[name], bar[name]))
            for name in self.bar
        )

    @property
    def name(self) -> str:
        """Name the servers: the first ones, and how many there are."""
        names = sorted(self.names, key=_natural)
        if len(names) == 1:
            return names[0]
        more = f" and {len(names) - NAMES:,} more" * (len(names) > NAMES)
        return f"{len(names):,} equal servers: {', '.join(names[:NAMES])}{more}"


class Servers:
    """Cards of all servers that were added."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cards: list[Card] = []
        self._rows: list[tuple[float, list[Cell]]] = []
        self._without_steps: list[str] = []
        self.count = 0

    def add(self, summary: InstanceSummary) -> None:
        """Add a server; one without steps is only counted."""
        self.count += 1
        if summary.cost is None:
            self._without_steps.append(f"{summary.title}.")
            return
        facts, bar = _facts(summary, summary.cost), summary.cost.bar
        share = summary.cost.connector.share if summary.cost.connector else -1.0
        row = _row(summary, summary.cost)
        self._rows.append((share, row))
        card = next((card for card in self._cards if card.is_like(facts, bar)), None)
        if card is None:
            is_detailed = len(self._cards) < DETAILED
            card = Card(
                facts,
                bar,
                share,
                added_cost(summary) is not None,
                answer(summary),
                self._sections(summary) if is_detailed else [],
                row,
            )
            self._cards.append(card)
        card.names.append(summary.instance.name)
        if len(card.titles) < NAMES:
            card.titles.append(summary.title)

    def _sections(self, summary: InstanceSummary) -> list[Section]:
        line = time_line(summary.instance, self._clock, INTERVALS, REQUESTS)
        return [*tables(summary), line]

    @property
    def cards(self) -> list[Card]:
        """The cards: what a patch of ours adds last, else the largest share first."""
        return sorted(self._cards, key=lambda card: (card.is_added, -card.share))

    @property
    def answer(self) -> list[str]:
        """The answer for the first card, by name where there are several servers."""
        if not self._cards:
            return self._without_steps[:SHOWN]
        first, *others = self.cards[0].paragraphs
        name = f"**{self.cards[0].name}.** " if self.count > 1 else ""
        return [name + first, *others]

    @property
    def page_sections(self) -> list[Section]:
        """Bars of the first cards; behind a click the others, tables and moments."""
        first, others = self.cards[:SHOWN], self.cards[SHOWN:]
        sections: list[Section] = [_bars("", first, with_first_answer=False)]
        if others:
            bars = _bars("", others[:DETAILED], with_first_answer=True)
            title = f"{len(others):,} more kinds of servers"
            sections.append(Group(title=title, sections=[bars]))
        if self.count > 1:
            sections.append(
                Group(title="All servers, a row each", sections=[self.table])
            )
        inside: list[Section] = [
            Group(
                title=f"All tables and moments of {card.name}", sections=card.sections
            )
            for card in self.cards
            if card.sections
        ]
        if len(inside) > SHOWN:
            return [*sections, Group(title="All tables and moments", sections=inside)]
        return [*sections, *inside]

    @property
    def terminal_sections(self) -> list[Section]:
        """The tables of the only server, or a row for each kind with its answer."""
        silent = [Words(title="", paragraphs=self._without_steps[:SHOWN])]
        if self.count == 1:
            titles = [f"{title}." for card in self._cards for title in card.titles]
            title = Words(title="", paragraphs=titles)
            return [title, *(s for card in self._cards for s in card.sections)]
        shown = self.cards[: SHOWN + 1]
        bars = _bars("", shown, with_first_answer=False)
        sections: list[Section] = [bars, *(silent if self._without_steps else [])]
        if left := len(self._cards) - len(shown):
            note = f"the page has {left:,} more kinds of servers"
            sections.append(Table(title="", note=note, columns=[""], rows=[]))
        return sections

    @property
    def table(self) -> Table:
        """A row for each server that has steps, the largest share first."""
        rows = [row for _, row in sorted(self._rows, key=lambda of: -of[0])]
        columns = [
            *("server", *PARTS, "step", "% of time", "batch"),
            *("steps", "requests"),
        ]
        note = (
            "µs per step, whose parts add up to it. Two servers can be compared where "
            "they had the same traffic: see the batch."
        )
        return Table(title="All servers", note=note, columns=columns, rows=rows)


def _bars(title: str, cards: list[Card], *, with_first_answer: bool) -> Bars:
    """Draw cards; the answer of the first one may stand on top of the page."""
    bars = [
        Bar(
            name=card.name,
            note=f"{'; '.join(card.titles)}.",
            values=[card.bar.get(part) for part in PARTS],
            paragraphs=card.paragraphs if number or with_first_answer else [],
        )
        for number, card in enumerate(cards)
    ]
    return Bars(title=title, unit=UNIT, parts=[*PARTS], bars=bars)


def _facts(summary: InstanceSummary, cost: Cost) -> tuple[object, ...]:
    header = summary.instance.header
    return (
        header.vllm_version,
        tuple(header.connectors),
        tuple(patches_of(summary)),
        cost.overlaps,
        tuple(cost.bar),
        cost.has_worker,
        tuple(thread.name for thread in summary.instance.threads),
    )


def _row(summary: InstanceSummary, cost: Cost) -> list[Cell]:
    batch = summary.instance.digest.all
    known = batch.sums.get("known.scheduled")
    values = [cost.bar.get(part) for part in PARTS]
    return [
        summary.instance.name,
        *(None if us is None else round(us, 1) for us in values),
        round(sum(cost.bar.values()), 1),
        round(100 * cost.connector.share, 2) if cost.connector else None,
        round(batch.sums["scheduled"] / known, 2) if known else None,
        cost.steps,
        summary.instance.all_requests,
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort dp2 before dp10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]
