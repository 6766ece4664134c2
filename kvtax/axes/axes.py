# SPDX-License-Identifier: Apache-2.0
"""The axes that a connector's cost per step may grow along, and the levels on each.

One axis moves while the others are held: 8 running requests of 64 tokens, a prefix
cache that is nearly empty, no arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass

# The variable with what the worker is given; a command line would show its secrets.
GIVEN = "KVTAX_CELL"


@dataclass(frozen=True)
class Axis:
    """`levels` in `units`; slopes are stated in us per step and `per` of them.

    A slope up to `margin_us` is no growth: some 50 us over the whole axis, or, per
    arrival, a small part of what vLLM's own scheduler takes.
    """

    units: str
    per_unit: str
    per: int
    margin_us: float
    levels: tuple[int, ...]


AXES = {
    "cache": Axis(
        units="cached blocks",
        per_unit="1,000 cached blocks",
        per=1_000,
        margin_us=3.0,
        levels=(256, 4_096, 8_192, 12_288, 16_384),
    ),
    "running": Axis(
        units="running requests",
        per_unit="running request",
        per=1,
        margin_us=0.2,
        levels=(1, 64, 128, 192, 256),
    ),
    "context": Axis(
        units="tokens of context",
        per_unit="1,000 tokens of context",
        per=1_000,
        margin_us=0.4,
        levels=(1_024, 32_768, 65_536, 131_072),
    ),
    "arrivals": Axis(
        units="arrivals per step",
        per_unit="arrival",
        per=1,
        margin_us=10.0,
        levels=(0, 2, 4, 8, 16),
    ),
    # All end in their step, beside the requests that decode.
    "prompt": Axis(
        units="tokens of an arriving prompt",
        per_unit="1,000 tokens of an arriving prompt",
        per=1_000,
        margin_us=6.0,
        levels=(64, 2_048, 4_096, 6_144, 8_128),
    ),
    # What is moved lies in so many places: one descriptor each, where they are merged.
    "fragments": Axis(
        units="fragments per arriving request of 64 blocks",
        per_unit="fragment",
        per=1,
        margin_us=0.8,
        levels=(1, 16, 32, 64),
    ),
    # Only of connectors with a tier of their own that can be emptied.
    "tier": Axis(
        units="blocks in the connector's tier",
        per_unit="1,000 blocks in the tier",
        per=1_000,
        margin_us=3.0,
        levels=(0, 4_096, 8_192, 16_384),
    ),
}
