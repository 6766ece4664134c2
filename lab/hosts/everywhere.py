# SPDX-License-Identifier: Apache-2.0
"""The same question to each host of a Ray cluster, about what lies there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lab.hosts.cluster import connected, in_short
from lab.hosts.code import Code, code, differences


def everywhere(
    address: str, ask: Callable[[Any, str], Any], about: Any
) -> Iterator[tuple[str, Any]]:
    """Yields each host's name with what `ask(about, name)` returns there.

    Or with an exception, if that went wrong or the host was lost or has other code.
    Raises HostsError.
    """
    with connected(address):
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                name = node["NodeManagerAddress"]
                there = ray.remote(_ask).options(
                    num_cpus=0,
                    max_retries=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        node["NodeID"], soft=False
                    ),
                )
                asked[there.remote(ask, about, name, code())] = name
        while asked:
            (done,), _ = ray.wait(list(asked))
            try:
                found = ray.get(done)
            except RayTaskError as error:
                found = error.cause
            except RayError as error:
                found = RuntimeError(in_short(error))
            yield asked.pop(done), found


def _ask(ask: Callable, about: Any, name: str, ours: Code) -> Any:
    if different := differences(ours, code()):
        raise RuntimeError(f"it has other code: {', '.join(different)}")
    return ask(about, name)
