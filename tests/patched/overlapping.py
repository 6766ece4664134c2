# SPDX-License-Identifier: Apache-2.0
"""An executor with which the engine has two steps in flight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvtax.engine import null_engine

# Enough for all, where two steps in flight and preemption never end: all requests are
# preempted in each schedule().
ENOUGH_BLOCKS = {"0.28.0": 600}


class Late:
    """A model output that is not ready before somebody waits, as on a busy GPU."""

    def __init__(self, output: Future) -> None:
        self.result = output.result

    def done(self) -> bool:
        return False


class Overlapping(UniProcExecutor):
    """Has the engine schedule a step while another one is in flight.

    vLLM does not do so on a CPU: the CPU's model runner cannot. The scheduler and the
    engine's loop can, so it is switched on for these alone, after the runner is made.
    """

    max_concurrent_batches = 2

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def sample_tokens(self, grammar_output, non_block: bool = False):
        output = super().sample_tokens(grammar_output, non_block)
        return Late(output) if non_block else output


@contextmanager
def two_steps_in_flight(num_blocks: int) -> Iterator[int]:
    """For engines that are made meanwhile; the blocks that they need."""
    executor = SimpleNamespace(get_class=lambda _: Overlapping)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(null_engine, "Executor", executor)
        yield ENOUGH_BLOCKS.get(vllm.__version__, num_blocks)
