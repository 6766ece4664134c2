# SPDX-License-Identifier: Apache-2.0
"""Fit a profile to this machine, and check that a sweep would start."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtax.config import ConfigError
from kvtax.engine import preflight
from kvtax.engine.errors import ServerError
from kvtax.engine.gpus import NoGpu, has_rdma, visible_gpus
from kvtax.engine.installation import Installation
from kvtax.engine.null_model import find_model
from kvtax.engine.preflight import PreflightError
from microbench.gpu_fit import DoesNotFit, Fit, fit_shape, fit_weights
from microbench.profile import Profile
from microbench.workshop import build_overlays


def fitted(profile: Profile) -> Profile:
    """Set the layers, blocks and Mooncake protocol of `profile` for this machine.

    A CPU profile, and any profile on a machine without a GPU, keeps its layers.
    Raises PreflightError if it does not fit, ConfigError if there is no such model.
    """
    if profile.flavour != "gpu":
        return profile
    protocol = profile.mooncake_protocol
    if protocol == "auto":
        protocol = "rdma" if has_rdma() else "tcp"
    try:
        gpu = visible_gpus()[0]
    except NoGpu:  # The preflight says so.
        return msgspec.structs.replace(profile, mooncake_protocol=protocol)
    try:
        fit = _fit(profile, gpu.memory_mib * 2**20)
    except DoesNotFit as error:
        raise PreflightError(f"{gpu.name}: {error}") from None
    return msgspec.structs.replace(
        profile,
        mooncake_protocol=protocol,
        layers=fit.layers,
        num_blocks=fit.num_blocks,
    )


def _fit(profile: Profile, memory_bytes: int) -> Fit:
    file = find_model(profile.model)
    config = json.loads(file.read_text())
    cache = config, profile.num_blocks, profile.block_size
    weights = [part.stat().st_size for part in file.parent.glob("*.safetensors")]
    if weights:
        return fit_weights(memory_bytes, sum(weights), *cache)
    return fit_shape(memory_bytes, *cache)


def choices(profile: Profile) -> list[str]:
    """Describe the choices of `fitted`."""
    if profile.layers is None:
        return []
    chosen = [
        f"{profile.model}: {profile.layers} layers and {profile.num_blocks} blocks of "
        f"{profile.block_size} tokens fit this GPU"
    ]
    if profile.mooncake_protocol == "tcp":
        chosen.append(
            "Mooncake over TCP: no RDMA port is up here. Instances with GPUs normally "
            "transfer by RDMA"
        )
    return chosen


def check(profile: Profile, installed: Installation) -> bool:
    """Print all reasons against a sweep of `profile`; return whether there are none."""
    problems = []
    try:
        profile = fitted(profile)
    except (ConfigError, PreflightError) as error:
        problems.append(str(error))
    problems += reasons(profile, installed)
    for choice in choices(profile):
        print(f"sweep: {choice}")
    if not problems:
        print(f"sweep: profile {profile.name} can be measured here")
        return True
    print(f"sweep: profile {profile.name} cannot be measured here:", file=sys.stderr)
    for reason in dict.fromkeys(problems):
        print("  - " + reason.replace("\n", "\n    "), file=sys.stderr)
    return False


def reasons(profile: Profile, installed: Installation) -> Iterator[str]:
    """Yield each reason that would stop a sweep, or one of its configs."""
    yield from preflight.resource_problems(profile, installed=installed)
    with tempfile.TemporaryDirectory(prefix="kvtax-check-") as scratch:
        folder = Path(scratch)
        try:
            profile.checkpoint(folder / "model")
        except ConfigError as error:
            yield str(error)
        try:
            preflight.check_import(folder, profile, installed)
        except ModuleNotFoundError:
            # resource_problems has reported a missing vLLM.
            return
        except ServerError:
            pass
        except PreflightError as error:
            yield str(error)
        _, errors = build_overlays(folder, profile.connectors(), installed)
        for reason in dict.fromkeys(errors.values()):
            names = ", ".join(name for name in errors if errors[name] == reason)
            yield f"{names}: {reason}"
