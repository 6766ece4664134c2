# SPDX-License-Identifier: Apache-2.0
"""Settings of the recorder, from the environment."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

logger = logging.getLogger("vllm.kvtax_probe")


def positive_number(name: str, default: float) -> float:
    """Read a positive number; `default` for any other: the engine must start."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = 0
    if 0 < number < float("inf"):
        return number
    logger.error("kvtax: %s=%s is no positive number, %g is used", name, text, default)
    return default


def label() -> dict[str, Any]:
    """Read the label of the headers; empty if it is no JSON object."""
    text = os.environ.get("KVTAX_STEP_RECORDS_LABEL", "{}")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    logger.error("kvtax: KVTAX_STEP_RECORDS_LABEL is no JSON object: %s", text)
    return {}


# One step in so many is recorded, drawn at random.
STEPS_EVERY = max(round(positive_number("KVTAX_STEP_RECORDS_EVERY", 1)), 1)
# One step in so many, drawn at random, has the CPU clocks, whose reading takes longer
# than all else, and the times of methods that are called many times in a step.
CPU_EVERY = max(round(positive_number("KVTAX_STEP_RECORDS_CPU_EVERY", 16)), 1)
# Limits of one file and its older half together.
MAX_BYTES = positive_number("KVTAX_STEP_RECORDS_MAX_MB", 1000) * 1e6
MAX_S = positive_number("KVTAX_STEP_RECORDS_MAX_HOURS", 1e9) * 3600
