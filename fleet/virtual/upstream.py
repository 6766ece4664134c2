# SPDX-License-Identifier: Apache-2.0
"""The proxy's way to the instances in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from multidict import MultiMapping

from fleet.virtual.instance import Asked, VirtualAnswer, VirtualInstance
from lab.records.instances import Instance


class VirtualUpstream:
    """fleet.proxy.upstream.Upstream: nobody is unreachable, and nothing breaks off."""

    def __init__(self, instances: Mapping[str, VirtualInstance]) -> None:
        self._instances = instances

    async def ask(
        self, instance: Instance, path: str, headers: MultiMapping[str], body: Asked
    ) -> VirtualAnswer:
        """The answer, once its first chunk is here."""
        answer = self._instances[instance.name].ask(body)
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer

    async def engine_id(self, instance: Instance) -> str:
        return instance.name


async def probe(instance: Instance) -> None:
    """Its /health is always good."""
