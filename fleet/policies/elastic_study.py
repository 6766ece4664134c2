# SPDX-License-Identifier: Apache-2.0
"""elastic_study: elastic with the constants of the reference study.

Four offloads under way (the study had eight instances), prefill instances in turn, and
120 s for a prefill. Ours are two, the one with the least to prefill, and 60 s.
"""

from __future__ import annotations

from typing import Literal

from . import elastic


class Parameters(elastic.Parameters, frozen=True, forbid_unknown_fields=True):
    """elastic's, with other defaults."""

    max_offloads: int = 4
    prefill_on: Literal["least_prefill", "in_turn"] = "in_turn"
    prefill_timeout_s: float | None = 120.0


decide = elastic.decide
