# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/profiles/: settings of every instance of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from kvtax.config import ConfigError, read_toml
from kvtax.engine.null_model import (
    Checkpoint,
    Forward,
    Time,
    real_model,
    write_null_model,
)
from kvtax.records.profile import Count, EngineSettings

from kvtax_fleet.paths import CONFIGS


class Transfer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Time of moving KV in virtual time, one way, between any two instances.

    A prompt's KV is sent in `pieces`: 1 when all of it is computed, as vLLM's Mooncake
    does; more, such as one per layer, each as soon as it is computed. Instances in real
    time move the KV of the model that they serve: a null model's is nearly nothing.
    """

    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=0)]
    gbit_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_us: Time = 0
    pieces: Annotated[int, msgspec.Meta(ge=1)] = 1

    def us(self, tokens: int) -> float:
        """Compute how long the KV of so many tokens keeps a link busy."""
        return tokens * self.kv_bytes_per_token * 8 / (self.gbit_s * 1e3)


class InstanceSettings(
    EngineSettings, forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """Settings of all instances of a fleet: fleet/configs/profiles/<name>.toml.

    Without `num_blocks` vLLM fills its memory with KV blocks: memory that a connector
    takes is then missing from the KV cache. With `forward` the null model is served,
    whose forward takes that long; else `model`, a checkpoint folder or a name in
    configs/models/. Without `transfer`, moving KV takes no virtual time.
    """

    summary: str
    # Optional here alone: other engines are compared at a given number of blocks.
    num_blocks: Count | None = None  # type: ignore[assignment]
    forward: Forward | None = None
    transfer: Transfer | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.forward is None) == (self.model is None):
            raise ValueError("give one of `forward` (null model) and `model`")

    def checkpoint(self, folder: Path) -> Checkpoint:
        """Make the served model in `folder` if it is not there already.

        Raises ConfigError if there is no such model.
        """
        if self.forward is not None:
            return write_null_model(folder, self.max_model_len, self.forward)
        return real_model(folder, self.model)


def slowed(settings: InstanceSettings, factor: float) -> InstanceSettings:
    """Multiply the simulated forward's times by `factor`.

    Raises ConfigError if no forward is simulated.
    """
    if factor == 1:
        return settings
    if settings.forward is None or factor <= 0:
        raise ConfigError(
            f"a time factor of {factor}: it must be above 0, and only the null model's "
            "forward can be made longer or shorter"
        )
    times = msgspec.structs.asdict(settings.forward)
    scaled = Forward(**{name: time_us * factor for name, time_us in times.items()})
    return msgspec.structs.replace(settings, forward=scaled)


def read_instance_settings(path: Path) -> InstanceSettings:
    """Read a profile of fleet/configs/profiles/. Raises ConfigError."""
    if not path.is_file():
        known = ", ".join(sorted(map(str, (CONFIGS / "profiles").glob("*.toml"))))
        raise ConfigError(f"no file {path}; there are: {known}")
    return msgspec.structs.replace(read_toml(path, InstanceSettings), name=path.stem)
