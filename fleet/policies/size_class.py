# SPDX-License-Identifier: Apache-2.0
"""Requests by how much of their prompt has to be computed: WARM to HUGE.

New tokens are the prompt's tokens less the cached ones. The limits are those of the
reference study, so that its classes and ours hold the same requests. On an H20 the
prefill of 5,000 new tokens of Qwen3-Coder-30B-A3B takes at least 0.25 s, of 20,000 at
least 1.8 s and of 50,000 at least 8.5 s (fleet.analyze.roofline).
"""

from __future__ import annotations

from typing import Literal, get_args

SizeClass = Literal["WARM", "MEDIUM", "HEAVY", "HUGE"]
CLASSES: tuple[SizeClass, ...] = get_args(SizeClass)

# WARM below the first limit, MEDIUM up to the second, HEAVY up to the third.
WARM_BELOW_TOKENS = 5_000
HEAVY_ABOVE_TOKENS = 20_000
HUGE_ABOVE_TOKENS = 50_000

LIMITS = (
    f"WARM below {WARM_BELOW_TOKENS:,}, MEDIUM to {HEAVY_ABOVE_TOKENS:,}, HEAVY to "
    f"{HUGE_ABOVE_TOKENS:,}, HUGE above"
)
