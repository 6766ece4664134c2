# SPDX-License-Identifier: Apache-2.0
"""The second worker path without a GPU: its real module, called by the CPU's runner.

vLLM's V2 model runner needs a GPU. All that it does with a connector is in one class of
one module, ActiveKVConnector. Here the CPU's runner calls that one where it would call
the connector itself, before and after its forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector


def connector_output(
    config: VllmConfig,
) -> Callable[..., AbstractContextManager[KVConnectorOutput]]:
    """What takes the place of KVConnectorModelRunnerMixin._get_kv_connector_output.

    The engine's connector must have been made.
    """
    active = ActiveKVConnector(config, {})
    takes = inspect.signature(active.post_forward).parameters

    @contextmanager
    def around_forward(
        scheduler_output, defer_finalize=False, **waits
    ) -> Iterator[KVConnectorOutput]:
        assert not defer_finalize, "only with a draft model"
        output = KVConnectorOutput()
        active.pre_forward(scheduler_output)
        yield output
        # Since 0.30.
        if finish := getattr(active, "finish_forward", None):
            finish()
        finished = scheduler_output
        if "finished_req_ids" in takes:
            finished = scheduler_output.finished_req_ids
        vars(output).update(vars(active.post_forward(finished, **waits)))

    return around_forward
