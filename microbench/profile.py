# SPDX-License-Identifier: Apache-2.0
"""Profiles of sweeps: the TOML files under configs/profiles/."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtax.config import read_toml
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.null_model import Checkpoint, Forward, real_model, write_null_model
from kvtax.load.plan import Plan, PlannedPhase
from kvtax.paths import CONFIGS
from kvtax.records.profile import ProfileRecord
from kvtax.records.requests import Phase

# Prompts of the requests that decode while a level is held, and of those that arrive:
# with its answer, one of these fills no block of 16 tokens.
DECODER_TOKENS, ARRIVAL_TOKENS, ANSWER_TOKENS = 16, 12, 2
# A server beyond the first `repeats` goes up the levels so many times as often.
FURTHER = 3
# As fast as the driver can send without falling behind.
FILL_RPS, DECODERS_RPS = 100.0, 100.0


class Profile(ProfileRecord, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Settings of a sweep: configs/profiles/<name>.toml.

    `own` are connectors without a file in configs/connectors/
    (kvtax.engine.connector).
    """

    own: dict[str, Connector] = msgspec.field(default_factory=dict)

    def connectors(self) -> dict[str, Connector]:
        """Return the configs to measure, by name. Raises ConfigError."""
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
        """Return the model to serve; make it in `folder` if it is missing.

        Raises ConfigError if there is no such model.
        """
        if self.null_model:
            forward = Forward(self.forward_us)
            return write_null_model(folder, self.max_model_len, forward)
        return real_model(folder, self.model, self.layers)

    def passes(self, repeat: int) -> int:
        """Return how often the `repeat`-th server of a config goes up the levels."""
        return self.load.ladder.passes * (FURTHER if repeat >= self.repeats else 1)

    def plan(self, model: str, vocab_size: int, repeat: int) -> Plan:
        """Plan the driver's requests: growth, plateau, and the passes of the ladder.

        Growth and plateau are of the first `repeats` servers only.
        """
        load = self.load
        growth_requests = -(-self.num_blocks // self._blocks(load.output_tokens))
        growth = [
            PlannedPhase(Phase.GROWTH.label, growth_requests, load.rate_rps),
            PlannedPhase(Phase.PLATEAU.label, load.plateau_requests, load.rate_rps),
        ]
        passes = [
            phase
            for number in range(self.passes(repeat))
            for phase in self._pass(number)
        ]
        return Plan(
            model=model,
            seed=repeat,
            vocab_size=vocab_size,
            prompt_tokens=load.prompt_tokens,
            output_tokens=load.output_tokens,
            arrival=load.arrival,
            lag_budget_ms=load.lag_budget_ms,
            request_timeout_s=load.request_timeout_s,
            phases=[*growth, *passes] if repeat < self.repeats else passes,
        )

    def _blocks(self, output_tokens: int) -> int:
        """Return how many blocks a request of the load's prompt leaves in the cache."""
        # The last token of a request is sampled but never computed, hence - 1.
        return (self.load.prompt_tokens + output_tokens - 1) // self.block_size

    def _pass(self, number: int) -> list[PlannedPhase]:
        """Fill the cache to each level in turn, and hold it there."""
        ladder = self.load.ladder
        phases: list[PlannedPhase] = []
        held_blocks = ladder.decoders * (
            (DECODER_TOKENS + ladder.output_tokens - 1) // self.block_size
        )
        filled = 0
        for place, share in enumerate(ladder.levels):
            more = share * self.num_blocks - filled
            if share == 1.0:
                # Blocks that are counted twice, and what a request holds meanwhile.
                more += 2 * self._blocks(1)
            requests = round(more / self._blocks(1))
            if place == 0:
                # Peers that read find a prompt at every level.
                requests = max(requests, 1)
            if requests > 0:
                phases.append(
                    PlannedPhase(
                        Phase.FILL.at(number, place),
                        requests,
                        FILL_RPS,
                        after_answers=True,
                        output_tokens=1,
                    )
                )
                filled += requests * self._blocks(1)
            phases += [
                PlannedPhase(
                    f"{Phase.FILL.at(number, place)}.decoders",
                    ladder.decoders,
                    DECODERS_RPS,
                    after_answers=True,
                    prompt_tokens=DECODER_TOKENS,
                    output_tokens=ladder.output_tokens,
                ),
                PlannedPhase(
                    Phase.HOLD.at(number, place),
                    ladder.arrivals,
                    ladder.arrivals_rps,
                    prompt_tokens=ARRIVAL_TOKENS,
                    output_tokens=ANSWER_TOKENS,
                ),
            ]
            filled += held_blocks
        phases[0] = msgspec.structs.replace(phases[0], reset_prefix_cache=True)
        return phases


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
