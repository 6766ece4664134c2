# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests with real transfers: patches, checkpoints, expected tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from kvtax.engine.installation import Installation, installation
from kvtax.engine.overlay import build_overlay
from tests.harness.tiny.server import BLOCK_TOKENS, TinyServer, Tokens, write_checkpoint

KV_TRANSFER: dict[str, dict[str, str | dict[str, str]]] = {
    "mooncake": {
        "kv_connector": "MooncakeConnector",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    },
    "nixl": {"kv_connector": "NixlConnector"},
}
# Without these, Mooncake does not start on a CPU, NIXL finds no blocks, and threads of
# NIXL and vLLM that are idle take a core each.
NEEDED = [
    "mooncake_cpu_layout",
    "nixl_cpu_layout",
    "nixl_progress_delay",
    "cpu_uniproc",
]
FIXES = [
    "block_pool_delta_listener",
    "mooncake_get_finished_short_circuit",
    "kv_transfer_abort_race",
    "kv_transfer_abort_defence",
]


class TinyServers:
    """A folder with vLLM patched and not, and two checkpoints; starts instances.

    vLLM is that of `installed`, by default of the Python that runs this. The attention
    of later releases for CPUs wants blocks of 32 tokens.
    """

    def __init__(
        self,
        folder: Path,
        installed: Installation | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.folder = folder
        self.installed = installed or installation()
        self.block_tokens = block_tokens
        self.checkpoint = write_checkpoint(folder / "checkpoint", seed=1)
        self.other_weights = write_checkpoint(folder / "other_weights", seed=2)
        self._overlays = {False: folder / "unpatched", True: folder / "patched"}
        for patched, overlay in self._overlays.items():
            patches = NEEDED + FIXES if patched else NEEDED
            build_overlay(overlay, patches, {"DELAY_US": 500}, self.installed)
        self._started = 0

    def instance(
        self,
        connector: str | None = None,
        kv_role: str = "kv_both",
        *,
        patched: bool = False,
        checkpoint: Path | None = None,
        on_load_failure: str = "fail",
        max_num_seqs: int = 32,
        env: dict[str, str] | None = None,
    ) -> TinyServer:
        """Begin to start an instance; `connector` None is plain vLLM."""
        config = None
        if connector is not None:
            config = KV_TRANSFER[connector] | {
                "kv_role": kv_role,
                "kv_load_failure_policy": on_load_failure,
            }
        self._started += 1
        return TinyServer(
            self.folder / f"instance{self._started}",
            self._overlays[patched],
            checkpoint or self.checkpoint,
            config,
            env or {},
            max_num_seqs,
            self.installed,
            self.block_tokens,
        )


Starting = TypeVar("Starting", bound=TinyServer)


@contextmanager
def ready(*starting: Starting) -> Iterator[tuple[Starting, ...]]:
    """Yield the instances once all of them answer; all are stopped on leaving."""
    with ExitStack() as stack:
        for instance in starting:
            stack.enter_context(instance)
        for instance in starting:
            instance.wait_ready()
        yield starting


class Reference:
    """The tokens that a single instance without a connector answers with."""

    def __init__(self, single: TinyServer) -> None:
        self._single = single
        self._known: dict[tuple[int, ...], Tokens] = {}

    async def tokens(self, prompts: list[Tokens]) -> list[Tokens]:
        missing = [prompt for prompt in prompts if tuple(prompt) not in self._known]
        answers = await asyncio.gather(*map(self._single.complete, missing))
        for prompt, answer in zip(missing, answers, strict=True):
            self._known[tuple(prompt)] = answer.tokens
        return [self._known[tuple(prompt)] for prompt in prompts]
