# SPDX-License-Identifier: Apache-2.0
"""threads.jsonl: what the threads of the engine's process do, four times a second.

The patch step_timing_v2 writes it inside vLLM, beside engine_step.jsonl.
"""

from __future__ import annotations

import msgspec

from lab.records.steps import FileHeader


class ThreadsHeader(FileHeader, tag_field="schema", tag="kvtax.threads/1"):
    """Header; written by the engine core."""


class ThreadTimes(msgspec.Struct, kw_only=True):
    """CPU time of each thread of the engine's process since the record before."""

    t_ns: int
    """When the record was made."""
    step_id: int
    """The last step that had begun."""
    threads: dict[str, float]
    """CPU time in us by thread. Python's threads go by their name in `threading`, all
    others by the kernel's; of equal names each gets `#` and its thread id. `model
    executor` are all that were there once vLLM had made that, but the main thread, and
    `ended threads` those that ended since the record before."""
