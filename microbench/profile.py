# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/profiles/: how a sweep is done."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from lab.config import read_toml
from lab.load.plan import Phase as PlannedPhase
from lab.load.plan import Plan
from lab.paths import CONFIGS
from lab.records.phases import Phase
from lab.serving.connector import Connector, load_connector
from lab.serving.null_model import Checkpoint, real_model, write_null_model
from lab.serving.settings import EngineSettings, Forward


class Load(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the driver sends: see lab.load.plan.Plan.

    The cache is filled, held full and reset `cycles` times.
    """

    prompt_tokens: int
    output_tokens: int
    rate_rps: float
    arrival: str
    plateau_requests: int
    after_reset_requests: int
    lag_budget_ms: float
    request_timeout_s: float
    cycles: int = 1


class Profile(EngineSettings, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """How a sweep is done: configs/profiles/<name>.toml.

    |cache| grows to nearly `num_blocks`. With `null_model` the null model is served,
    whose forward sleeps for `forward_us`; else `model`, a checkpoint folder or a name
    in configs/models/. If that has no weights, only so many `layers` of it are served.
    Each config is measured on `repeats` servers, and one that is then undecided on up
    to `most_repeats`, while all trials take less than `minutes`. `mooncake_protocol`
    replaces what the configs say; "auto" is rdma where an RDMA port is up, else tcp
    (microbench.fitted). `patches` are added to those of each config. `own` are
    connectors without a file in configs/connectors/ (lab.serving.own_connector).
    """

    summary: str
    null_model: bool
    configs: list[str]
    repeats: int
    most_repeats: int
    minutes: float
    load: Load
    forward_us: int = 0
    model: str | None = None
    layers: int | None = None
    mooncake_protocol: Literal["tcp", "rdma", "auto"] | None = None
    patches: list[str] = msgspec.field(default_factory=list)
    own: dict[str, Connector] = msgspec.field(default_factory=dict)

    def connectors(self) -> dict[str, Connector]:
        """The configs to be measured, by name. Raises ConfigError."""
        return {name: self._connector(name) for name in self.configs}

    def _connector(self, name: str) -> Connector:
        connector = self.own.get(name) or load_connector(name)
        connector = msgspec.structs.replace(
            connector, patches=[*connector.patches, *self.patches]
        )
        transfer = connector.kv_transfer_config or {}
        extra = transfer.get("kv_connector_extra_config", {})
        if self.mooncake_protocol is None or "mooncake_protocol" not in extra:
            return connector
        extra = extra | {"mooncake_protocol": self.mooncake_protocol}
        return msgspec.structs.replace(
            connector,
            kv_transfer_config=transfer | {"kv_connector_extra_config": extra},
        )

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The model to be served, made in `folder` if it is not there already.

        Raises ConfigError if there is no such model.
        """
        if self.null_model:
            forward = Forward(self.forward_us)
            return write_null_model(folder, self.max_model_len, forward)
        return real_model(folder, self.model, self.layers)

    def plan(self, model: str, vocab_size: int, seed: int) -> Plan:
        """The driver's plan: fill the cache, hold it full, reset it, start over."""
        load = self.load
        # The last token of a request is sampled but never computed, hence - 1.
        blocks_per_request = (
            load.prompt_tokens + load.output_tokens - 1
        ) // self.block_size
        growth_requests = -(-self.num_blocks // blocks_per_request)
        return Plan(
            model=model,
            seed=seed,
            vocab_size=vocab_size,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            arrival=load.arrival,
            lag_budget_ms=load.lag_budget_ms,
            request_timeout_s=load.request_timeout_s,
            phases=[
                phase
                for cycle in range(load.cycles)
                for phase in self._cycle(cycle, growth_requests)
            ]
            + [
                PlannedPhase(
                    Phase.AFTER_RESET.label,
                    load.after_reset_requests,
                    load.rate_rps,
                    reset_prefix_cache=True,
                )
            ],
        )

    def _cycle(self, cycle: int, growth_requests: int) -> list[PlannedPhase]:
        """Fill the cache, after a reset unless it is new, and hold it full."""
        load = self.load
        return [
            PlannedPhase(
                Phase.GROWTH.named(cycle),
                growth_requests,
                load.rate_rps,
                reset_prefix_cache=cycle > 0,
            ),
            PlannedPhase(
                Phase.PLATEAU.named(cycle), load.plateau_requests, load.rate_rps
            ),
        ]


def load_profile(name: str) -> Profile:
    profile = read_toml(CONFIGS / "profiles" / f"{name}.toml", Profile)
    return msgspec.structs.replace(profile, name=name)


def measured_with(name: str, configs: list[str]) -> list[str]:
    """`name`, and those of `configs` without which it cannot be judged.

    The baseline, its twin, which shows the noise, and the connector that does nothing.
    """
    roles = {config: load_connector(config).report.role for config in configs}
    before = [one for one in configs if roles[one] in ("baseline", "floor")]
    return [*before, name, *(one for one in configs if roles[one] == "twin")]
