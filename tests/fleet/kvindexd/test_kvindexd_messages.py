# SPDX-License-Identifier: Apache-2.0
"""What kvindexd's tests take for vLLM's KV events is what the releases publish."""

from __future__ import annotations

import json

import pytest

from kvindex.cmd.kvindexd.events import messages


def test_the_committed_messages_are_those_of_the_releases() -> None:
    committed = messages.FILE.read_text()
    if missing := json.loads(committed).keys() - messages.releases().keys():
        pytest.skip(f"no sources of {', '.join(missing)}: run make vllm-releases")
    assert messages.document() == committed
