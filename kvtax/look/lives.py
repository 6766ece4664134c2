# SPDX-License-Identifier: Apache-2.0
"""One time line of all lives of an engine, which show where it was started anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvtax.report.document import Gauge, Requests, TimeLine


def joined(line: TimeLine, later: TimeLine) -> TimeLine:
    """Put a later life behind an engine's time line, with a gap and a mark between."""
    width_s = line.t_s[1] - line.t_s[0] if len(line.t_s) > 1 else 0.0
    begun_s = later.t_s[0]
    sizes = (len(line.t_s), len(later.t_s))

    def both(name: str, gap: float | None = None) -> list[Any]:
        return [*getattr(line, name), gap, *getattr(later, name)]

    return TimeLine(
        title=line.title,
        note=f"{line.note} Restarted at {begun_s:,.1f} s. {later.note}",
        t_s=both("t_s", min(line.t_s[-1] + width_s, begun_s)),
        steps=both("steps", 0),
        parts=_columns(line.parts, later.parts, sizes, [None]),
        slowest_us=both("slowest_us"),
        slowest_step=both("slowest_step"),
        slowest_parts=_columns(line.slowest_parts, later.slowest_parts, sizes, [None]),
        gauges=[
            Gauge(
                name=one.name,
                values=[*one.values, None, *other.values],
                of_requests=one.of_requests,
            )
            for one, other in zip(line.gauges, later.gauges, strict=True)
        ],
        requests=_requests(line.requests, later.requests),
        restarts_s=[*line.restarts_s, begun_s],
    )


def _requests(first: Requests | None, second: Requests | None) -> Requests | None:
    if first is None or second is None:
        return first or second
    sizes = (len(first.ids), len(second.ids))
    return msgspec.structs.replace(
        first,
        total=first.total + second.total,
        ids=[*first.ids, *second.ids],
        arrival_s=[*first.arrival_s, *second.arrival_s],
        end_s=[*first.end_s, *second.end_s],
        columns=_columns(first.columns, second.columns, sizes, []),
    )


def _columns(
    first: Mapping[str, Sequence[Any]],
    second: Mapping[str, Sequence[Any]],
    sizes: tuple[int, int],
    gap: list[None],
) -> dict[str, list[Any]]:
    """Put columns behind each other; one that is missing in a table is null there."""
    nothing = [[None] * size for size in sizes]
    return {
        name: [*first.get(name, nothing[0]), *gap, *second.get(name, nothing[1])]
        for name in {**first, **second}
    }
