# SPDX-License-Identifier: Apache-2.0
"""Settings of the recorder, from the environment."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import Any

import msgspec

logger = logging.getLogger("vllm.kvtax_probe")

# More steps in a row than this are never made.
MOST_STEPS = 10**9


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


def whole_number(name: str, default: int) -> int:
    """Read a number of steps, as positive_number does."""
    number = positive_number(name, default)
    if round(number) == number <= MOST_STEPS:
        return round(number)
    text = os.environ[name]
    logger.error("kvtax: %s=%s is no number of steps, %d is used", name, text, default)
    return default


def label() -> dict[str, Any]:
    """Read the label of the headers; empty if it is no JSON object."""
    text = os.environ.get("KVTAX_STEP_RECORDS_LABEL", "{}")
    # Half a surrogate pair, or too deep a nesting, can be read and not be written.
    with suppress(Exception):
        value = json.loads(text)
        msgspec.json.encode(value)
        if isinstance(value, dict):
            return value
    logger.error("kvtax: KVTAX_STEP_RECORDS_LABEL is no JSON object: %s", text)
    return {}


def has_plain_ids() -> bool:
    """Read whether request ids are recorded as they are."""
    text = os.environ.get("KVTAX_REQUEST_IDS") or "hashed"
    if text not in ("hashed", "plain"):
        logger.error("kvtax: KVTAX_REQUEST_IDS=%s is unknown, ids are hashed", text)
    return text == "plain"


# One step in so many is recorded, drawn at random.
STEPS_EVERY = whole_number("KVTAX_STEP_RECORDS_EVERY", 1)
# One step in so many, drawn at random, has the CPU clocks, whose reading takes longer
# than all else, and the times of methods that are called many times in a step.
CPU_EVERY = whole_number("KVTAX_STEP_RECORDS_CPU_EVERY", 16)
# Limits of one file and its older half together.
MAX_BYTES = positive_number("KVTAX_STEP_RECORDS_MAX_MB", 1000) * 1e6
MAX_S = positive_number("KVTAX_STEP_RECORDS_MAX_HOURS", 1e9) * 3600
