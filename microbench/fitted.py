# SPDX-License-Identifier: Apache-2.0
"""A GPU's profile as it is measured on this machine: its sizes and its network."""

from __future__ import annotations

import json

import msgspec

from lab.serving.gpu_fit import DoesNotFit, Fit, fit_shape, fit_weights
from lab.serving.gpus import NoGpu, has_rdma, visible_gpus
from lab.serving.null_model import find_model
from lab.serving.preflight import PreflightError
from microbench.profile import Profile


def fitted(profile: Profile) -> Profile:
    """`profile` with the layers, blocks and Mooncake protocol that this machine takes.

    A profile of the CPU's is returned as it is, as is one without a GPU to fit it to.
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
    """What `fitted` chose, in words."""
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
