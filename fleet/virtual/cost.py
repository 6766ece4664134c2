# SPDX-License-Identifier: Apache-2.0
"""What a step takes: the device's time as the fleet's profile has it."""

from __future__ import annotations

import msgspec

from lab.serving.settings import Forward
from lab.serving.vllm_plugin.kvtax_null_model.forward import SimulatedForward


class ForwardCost:
    """The simulated forward of the null model, by the very same formula."""

    def __init__(self, forward: Forward) -> None:
        self._forward = SimulatedForward(**msgspec.structs.asdict(forward))

    def device_ns(self, tokens: int, context_tokens: int) -> int:
        return round(self._forward.duration_us(tokens, context_tokens) * 1e3)
