# SPDX-License-Identifier: Apache-2.0
"""The axes that a connector's cost per step may grow along, and the levels on each.

One axis moves while the others are held: 8 running requests of 64 tokens, a prefix
cache that is nearly empty, no arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """`levels` in `unit`; slopes are stated in us per step and `per` of them.

    A slope up to `margin_us` is no growth: some 50 us over the whole axis, or, per
    arrival, a tenth of what vLLM's own scheduler takes.
    """

    unit: str
    per: int
    margin_us: float
    levels: tuple[int, ...]

    @property
    def per_unit(self) -> str:
        """What a slope is per, beside the step: `1,000 cached blocks`."""
        return f"{self.per:,} {self.unit}s" if self.per > 1 else self.unit


AXES = {
    "cache": Axis("cached block", 1_000, 3.0, (256, 4_096, 8_192, 12_288, 16_384)),
    "running": Axis("running request", 1, 0.2, (1, 64, 128, 192, 256)),
    "context": Axis("token of context", 1_000, 0.4, (1_024, 32_768, 65_536, 131_072)),
    "arrivals": Axis("arrival per step", 1, 10.0, (0, 2, 4, 8, 16)),
}
