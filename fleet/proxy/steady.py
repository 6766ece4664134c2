# SPDX-License-Identifier: Apache-2.0
"""A part of a chat without what changes from turn to turn and no model gets to see.

Anthropic's clients mark the newest messages with `cache_control`, and move the marks
with each turn. Claude Code begins its system prompt with a billing header that has a
hash of the request; vLLM leaves it out (entrypoints/anthropic/serving.py, 0.18.1).
"""

from __future__ import annotations

from typing import Any

import msgspec

_MARK, BILLING = "cache_control", "x-anthropic-billing-header"
_HINTS = (_MARK.encode(), BILLING.encode())


def steady(raw: bytes) -> bytes:
    """The same JSON, or what is left of it. Raises one of top_level.UNREADABLE."""
    if not any(hint in raw for hint in _HINTS):
        return raw
    return msgspec.json.encode(_without(msgspec.json.decode(raw)))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(one) for name, one in value.items() if name != _MARK}
    if isinstance(value, list):
        return [_without(one) for one in value if not _is_billing(one)]
    return value


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)
