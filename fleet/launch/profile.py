# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/fleet/: what every instance of a fleet is like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lab.config import ConfigError
from lab.paths import CONFIGS


class Forward(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a forward of the null model takes: lab/serving/vllm_plugin says how."""

    forward_us: float
    us_per_token: float = 0
    us_per_context_token: float = 0


class FleetProfile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's settings, named as microbench.profile.Profile names them.

    With `forward` the null model is served, which takes that long; else `model`, a
    checkpoint folder.
    """

    summary: str
    flavour: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    forward: Forward | None = None
    model: str | None = None
    server_args: list[str] = []
    server_env: dict[str, str] = {}
    kv_transfer_config: dict[str, Any] = {}
    name: str = ""

    def __post_init__(self) -> None:
        if (self.forward is None) == (self.model is None):
            raise ValueError("give one of `forward` (null model) and `model`")


def slowed(profile: FleetProfile, factor: float) -> FleetProfile:
    """The profile with a simulated forward that takes `factor` times as long.

    Raises ConfigError where nothing is simulated.
    """
    if factor == 1:
        return profile
    if profile.forward is None or factor <= 0:
        raise ConfigError(
            f"a time factor of {factor}: it must be above 0, and only the null model's "
            "forward can be made longer or shorter"
        )
    times = msgspec.structs.asdict(profile.forward)
    scaled = Forward(**{name: time_us * factor for name, time_us in times.items()})
    return msgspec.structs.replace(profile, forward=scaled)


def read_profile(path: Path) -> FleetProfile:
    """Raises ConfigError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=FleetProfile)
    except FileNotFoundError:
        known = ", ".join(sorted(map(str, (CONFIGS / "fleet").glob("*.toml"))))
        raise ConfigError(f"no profile {path}; there are: {known}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return msgspec.structs.replace(found, name=path.stem)
