# SPDX-License-Identifier: Apache-2.0
"""A connector that does nothing but take a known time in one of its methods.

Loaded into the engine of the same process, which sets DELAY_US.
"""

import time

from connectors.noop import NoopConnector
from connectors.synthetic_cost import WorkerReport

# One on each stretch of a step: schedule(), the update, before the launch and after.
METHODS = (
    "build_connector_meta",
    "update_connector_output",
    "start_load_kv",
    "get_finished",
)
DELAY_US: dict[str, float] = dict.fromkeys(METHODS, 0.0)


def _delayed(name: str):
    def method(self, *args, **kwargs):
        result = getattr(NoopConnector, name)(self, *args, **kwargs)
        # By the thread's own clock: while it is preempted, no work is done.
        end_ns = time.thread_time_ns() + DELAY_US[name] * 1e3
        while time.thread_time_ns() < end_ns:
            pass
        return result

    return method


class DelayingConnector(NoopConnector):
    def build_connector_worker_meta(self) -> WorkerReport:
        # So that vLLM calls update_connector_output in each step.
        return WorkerReport()


for _name in METHODS:
    setattr(DelayingConnector, _name, _delayed(_name))
