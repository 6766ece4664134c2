# SPDX-License-Identifier: Apache-2.0
"""Settings of a run's proxy and replayer, in real and in virtual time.

A process gets them as one document: `--settings FILE`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtax_fleet.experiment.config import Arm, Experiment
from kvtax_fleet.proxy.settings import Settings
from kvtax_fleet.records.instances import Instance
from kvtax_fleet.replay.options import Options


def proxy_settings(arm: Arm, instances: Sequence[Instance]) -> Settings:
    """Return the arm's settings: the mirror holds as much as the smallest cache."""
    settings = Settings(policy=arm.policy, parameters=arm.parameters)
    held = [each.kv_tokens for each in instances]
    known = [tokens for tokens in held if tokens is not None]
    if len(known) < len(held):
        return settings
    return msgspec.structs.replace(settings, mirror_tokens=min(known))


def replay_options(
    experiment: Experiment, concurrency: int, url: str, trace: str, vocab_size: int
) -> Options:
    """Return the options of a replay with so many sessions for each instance."""
    return Options(
        url=url,
        trace=trace,
        vocab_size=vocab_size,
        time_scale=experiment.time_scale,
        max_inflight_sessions=concurrency * experiment.instances,
        closed_loop=not experiment.open_loop,
        trace_times=experiment.trace_times,
        timeout_s=experiment.request_timeout_s,
        lag_budget_ms=experiment.lag_budget_ms,
    )
