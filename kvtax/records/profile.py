# SPDX-License-Identifier: Apache-2.0
"""Profiles: the settings of a sweep, and of every vLLM that is started."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class EngineSettings(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """The keys that configs/profiles/ and fleet/configs/profiles/ have in common."""

    flavour: Literal["cpu", "gpu"]
    """The environment that the settings are for."""
    num_blocks: Count
    """Blocks of an engine's KV cache."""
    block_size: Count
    """Tokens per block."""
    max_model_len: Count
    """vLLM's `--max-model-len`."""
    max_num_batched_tokens: Count
    """vLLM's `--max-num-batched-tokens`."""
    max_num_seqs: Count
    """vLLM's `--max-num-seqs`."""
    tensor_parallel: Count = 1
    """Workers of an engine."""
    data_parallel: Count = 1
    """Engines of a server, each with a KV cache of its own."""
    server_args: list[str] = []
    """Added to vLLM's command line."""
    server_env: dict[str, str] = {}
    """Added to vLLM's environment."""
    kv_transfer_config: dict[str, Any] = {}
    """Added to that of every connector."""
    name: str = ""
    """The profile's file, without `.toml`."""

    @property
    def workers(self) -> int:
        """Settings of one server; on GPUs each has a device of its own."""
        return self.tensor_parallel * self.data_parallel


class Ladder(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Levels of |cache| that are held."""

    levels: list[float]
    """Shares of `num_blocks`, from low to high; a level of 1 evicts."""
    passes: int
    """How often a server holds all levels, each time in another order, one of them
    twice, with resets before a lower one."""
    decoders: int
    """Requests that decode while a level is held."""
    output_tokens: int
    """Tokens that each of them decodes."""
    arrivals: int
    """Requests that arrive meanwhile, too short to fill a block."""
    arrivals_rps: float
    """How many of these arrive per second."""
    many_decoders: int = 0
    """Requests that decode while the lowest and the stated level are held once more in
    each pass; 0: they are not."""

    @property
    def holds_per_pass(self) -> int:
        """Holds of all levels, of one of them again, and of two with many requests."""
        return len(self.levels) + 1 + 2 * bool(self.many_decoders)

    @property
    def stated_level(self) -> int:
        """Number of the highest level below a full cache, where costs are stated."""
        below = [number for number, share in enumerate(self.levels) if share < 1.0]
        return max(below, default=len(self.levels) - 1)


class Load(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Load of the driver: growth from empty to full, a plateau, then the levels."""

    prompt_tokens: int
    """Prompt tokens of a request of growth and plateau."""
    output_tokens: int
    """Tokens that it is answered with."""
    rate_rps: float
    """Requests per second."""
    arrival: Literal["constant", "poisson"]
    """How the requests arrive."""
    plateau_requests: int
    """Requests while the cache is full."""
    lag_budget_ms: float
    """Budget for the p99 of how late requests are sent."""
    request_timeout_s: float
    """Until a request counts as failed."""
    ladder: Ladder
    """The levels that are held."""


class ProfileRecord(
    EngineSettings, forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """Settings of a sweep: configs/profiles/<name>.toml as resolved."""

    summary: str
    """What the profile is for."""
    null_model: bool
    """Whether the null model is served."""
    configs: list[str]
    """The configs that are measured."""
    repeats: int
    """Servers of each config."""
    most_repeats: int
    """Servers of a config that is undecided."""
    minutes: float
    """Time of all trials beyond which no further server is started."""
    load: Load
    """The load of each server."""
    forward_us: int = 0
    """Sleep of the null model's forward."""
    model: str | None = None
    """Checkpoint folder, or a name in `configs/models/`; null with the null model."""
    layers: int | None = None
    """Layers that are served of a model without weights."""
    mooncake_protocol: Literal["tcp", "rdma", "auto"] | None = None
    """Replaces what the configs say; `auto` is rdma where an RDMA port is up."""
    patches: list[str] = []
    """Added to those of each config."""
    pairs: dict[str, str] = {}
    """Configs whose cost over that of another one is measured by pairs inside one
    process, after the servers."""
    own: dict[str, Any] = {}
    """Connectors without a file in `configs/connectors/`, by name."""

    @property
    def looks(self) -> int:
        """Number of times that a run may look at its verdicts."""
        return 1 + max(self.most_repeats - self.repeats, 0)
