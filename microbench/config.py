# SPDX-License-Identifier: Apache-2.0
"""The TOML files under configs/: what is measured (connectors) and how (profiles)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from microbench.driver.plan import Phase, Plan

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(Exception):
    """A config file is missing or wrong; the message names file and field."""


class Connector(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One measured configuration: configs/connectors/<name>.toml.

    `env` is added to the server's environment. With `reads_per_s` a peer reads
    prefixes from the server as often, throughout (microbench.direct_read_peer).
    """

    summary: str
    patches: list[str]
    patch_parameters: dict[str, int | float | str] = {}
    kv_transfer_config: dict[str, Any] | None = None
    env: dict[str, str] = {}
    reads_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Load(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the driver sends: see microbench.driver.plan.Plan."""

    prompt_tokens: int
    output_tokens: int
    rate_rps: float
    arrival: str
    plateau_requests: int
    after_reset_requests: int
    lag_budget_ms: float
    request_timeout_s: float


class Profile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a sweep is done: configs/profiles/<name>.toml.

    `num_blocks` blocks of `block_size` tokens are the KV cache; |cache| grows to
    nearly that. `forward_us` is the sleep that stands for the forward (null model
    only). `server_args` are added to vLLM's command line, and
    `kv_transfer_config` to that of every connector.
    """

    summary: str
    flavour: str
    null_model: bool
    configs: list[str]
    repeats: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    load: Load
    name: str = ""
    forward_us: int = 0
    model: str | None = None
    server_args: list[str] = []
    server_env: dict[str, str] = {}
    kv_transfer_config: dict[str, Any] = {}

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
                Phase("growth", growth_requests, load.rate_rps),
                Phase("plateau", load.plateau_requests, load.rate_rps),
                Phase(
                    "after_reset",
                    load.after_reset_requests,
                    load.rate_rps,
                    reset_prefix_cache=True,
                ),
            ],
        )


def load_connector(name: str) -> Connector:
    return _load(CONFIGS / "connectors" / f"{name}.toml", Connector)


def load_profile(name: str) -> Profile:
    profile = _load(CONFIGS / "profiles" / f"{name}.toml", Profile)
    return msgspec.structs.replace(profile, name=name)


def _load(path: Path, kind: type) -> Any:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.toml")))
        raise ConfigError(
            f"no {path.parent.name} config named {path.stem!r}; there are: {known}"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
