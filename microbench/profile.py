# SPDX-License-Identifier: Apache-2.0
"""Profiles of sweeps: the TOML files under configs/profiles/."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvtax.config import read_toml
from kvtax.engine.connector import Connector, load_connector
from kvtax.engine.null_model import Checkpoint, Forward, real_model, write_null_model
from kvtax.load.plan import Plan, PlannedPhase
from kvtax.paths import CONFIGS
from kvtax.records.profile import ProfileRecord
from kvtax.records.requests import DECODERS, EVENT_REQUESTS, Phase

# Prompts of the requests that decode while a level is held, and of those that arrive:
# with its answer, one of these fills no block of 16 tokens.
DECODER_TOKENS, ARRIVAL_TOKENS, ANSWER_TOKENS = 16, 12, 2
# Few requests fill the cache, and a scheduled prompt is one step.
FILL_TOKENS = 8_000
# As fast as the driver can send without falling behind.
FILL_RPS, DECODERS_RPS = 100.0, 1_000.0
# Before a hold.
MOST_PAUSE_S = 0.1
# Behind one hold of each pass: a pause, then so many requests of each kind.
IDLE_S = 1.0
LONG_TOKENS = 4_096
# First word of the seed of a server's holds.
HOLDS = 3


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

    def growing(self) -> set[str]:
        """Return the configs whose first server has growth and plateau.

        Those of which the reference study has figures, whose protocol it is.
        """
        connectors = self.connectors().items()
        return {name for name, own in connectors if own.report.reference is not None}

    def plan(self, model: str, vocab_size: int, repeat: int, grows: bool) -> Plan:
        """Plan the driver's requests: growth and plateau if it `grows`, then passes."""
        load = self.load
        growth = []
        if grows:
            requests = -(-self.num_blocks // self._blocks(load.output_tokens))
            growth = [
                PlannedPhase(Phase.GROWTH.label, requests, load.rate_rps),
                PlannedPhase(Phase.PLATEAU.label, load.plateau_requests, load.rate_rps),
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
            phases=[*growth, *self._phases(repeat)],
        )

    def _blocks(self, output_tokens: int) -> int:
        """Return how many blocks a request of the load's prompt leaves in the cache."""
        # The last token of a request is sampled but never computed, hence - 1.
        return (self.load.prompt_tokens + output_tokens - 1) // self.block_size

    def _holds(self, repeat: int) -> Iterator[_Hold]:
        """Yield the holds of all passes of the `repeat`-th server.

        All configs have the same holds. In a random order a level is neither a time nor
        an age of the cache, and with random pauses no neighbour keeps pace with it.
        Many decoders follow a hold of their level in every second pass, where the
        cache is older than behind a reset. Events follow a hold of the lowest and of
        the highest level in turn.
        """
        ladder = self.load.ladder
        rng = np.random.default_rng([HOLDS, repeat])
        many = (0, ladder.stated_level) if ladder.many_decoders else ()
        for number in range(ladder.passes):
            levels = [*range(len(ladder.levels)), rng.integers(len(ladder.levels))]
            left = rng.permutation(many).tolist()
            eventful = len(ladder.levels) - 1 if number % 2 else 0
            for level in rng.permutation(levels).tolist():
                pause_s = rng.uniform(0, MOST_PAUSE_S)
                yield _Hold(level, ladder.decoders, pause_s, level == eventful)
                eventful = -1 if level == eventful else eventful
                if number % 2 and level in left:
                    left.remove(level)
                    yield _Hold(level, ladder.many_decoders)
            for level in left:
                yield _Hold(level, ladder.many_decoders)

    def _phases(self, repeat: int) -> Iterator[PlannedPhase]:
        """Fill the cache to the level of each hold, and hold it there."""
        ladder = self.load.ladder
        blocks_of_prompt = FILL_TOKENS // self.block_size
        filled, last_fill = float("inf"), ""
        for number, hold in enumerate(self._holds(repeat)):
            share = ladder.levels[hold.level]
            # Peers that read find a prompt at every level.
            target = max(share * self.num_blocks, blocks_of_prompt)
            if share == 1.0:
                # Blocks that are counted twice, and what a request holds meanwhile.
                target += 2 * blocks_of_prompt
            # What holds leave behind is no reason to begin anew, but at the empty
            # level, where it is as much as the level, which is soon made again.
            is_empty = not share and hold.decoders == ladder.decoders
            reset = target < filled - (0 if is_empty else blocks_of_prompt)
            filled = 0 if reset else filled
            requests = max(round((target - filled) / blocks_of_prompt), 0)
            fill = Phase.FILL.at(number, hold.level, hold.decoders)
            if requests:
                yield PlannedPhase(
                    fill,
                    requests,
                    FILL_RPS,
                    after_answers=True,
                    reset_prefix_cache=reset,
                    prompt_tokens=FILL_TOKENS,
                    output_tokens=1,
                )
                filled, last_fill = filled + requests * blocks_of_prompt, fill
            yield from self._held(number, hold)
            blocks_of_decoder = DECODER_TOKENS + ladder.output_tokens - 1
            filled += hold.decoders * (blocks_of_decoder // self.block_size)
            if hold.has_events:
                yield from self._events(number, hold, last_fill)
                filled += EVENT_REQUESTS[Phase.LONG] * LONG_TOKENS // self.block_size

    def _held(self, number: int, hold: _Hold) -> Iterator[PlannedPhase]:
        """Start the requests that decode, and those that arrive meanwhile."""
        ladder, place = self.load.ladder, (number, hold.level, hold.decoders)
        yield PlannedPhase(
            f"{Phase.FILL.at(*place)}{DECODERS}",
            hold.decoders,
            DECODERS_RPS,
            after_answers=True,
            pause_s=hold.pause_s,
            prompt_tokens=DECODER_TOKENS,
            output_tokens=ladder.output_tokens,
        )
        yield PlannedPhase(
            Phase.HOLD.at(*place),
            ladder.arrivals,
            ladder.arrivals_rps,
            prompt_tokens=ARRIVAL_TOKENS,
            output_tokens=ANSWER_TOKENS,
        )

    def _events(
        self, number: int, hold: _Hold, last_fill: str
    ) -> Iterator[PlannedPhase]:
        """Send what users do beside decoding: after idleness, a hit, a long prompt."""
        place, rps = (number, hold.level, hold.decoders), self.load.ladder.arrivals_rps
        event = partial(PlannedPhase, after_answers=True, output_tokens=ANSWER_TOKENS)
        yield event(
            Phase.AFTER_IDLE.at(*place),
            EVENT_REQUESTS[Phase.AFTER_IDLE],
            rps,
            pause_s=IDLE_S,
            prompt_tokens=ARRIVAL_TOKENS,
        )
        yield event(
            Phase.HIT.at(*place),
            EVENT_REQUESTS[Phase.HIT],
            rps,
            prompt_tokens=FILL_TOKENS,
            repeats_prompt=last_fill,
        )
        prompts = EVENT_REQUESTS[Phase.LONG]
        yield event(Phase.LONG.at(*place), prompts, rps, prompt_tokens=LONG_TOKENS)


class _Hold(NamedTuple):
    level: int
    decoders: int
    pause_s: float = 0.0
    has_events: bool = False


def load_profile(name: str) -> Profile:
    profile = read_toml(CONFIGS / "profiles" / f"{name}.toml", Profile)
    return msgspec.structs.replace(profile, name=name)


def measured_with(name: str, configs: list[str]) -> list[str]:
    """`name`, and those of `configs` without which it cannot be judged.

    The baseline, its twin, which shows the noise, and the connector that does nothing.
    """
    roles = {config: load_connector(config).report.role for config in configs}
    before = [config for config in configs if roles[config] in ("baseline", "floor")]
    return [*before, name, *(config for config in configs if roles[config] == "twin")]
