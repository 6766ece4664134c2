# SPDX-License-Identifier: Apache-2.0
"""Which GPUs each instance of a fleet has to itself."""

from __future__ import annotations

from fleet.launch.spec import FleetSpec, SpecError
from lab.serving.gpus import NoGpu, visible_gpus


def shared_out(spec: FleetSpec) -> list[list[int]]:
    """A list for each instance: a GPU for each of its workers, and none for two.

    They are numbered as nvidia-smi does, and taken in the order in which
    CUDA_VISIBLE_DEVICES names them where that is set. Without GPUs in the fleet the
    lists are empty. Raises SpecError if there are too few.
    """
    workers = spec.settings.workers
    if spec.settings.flavour != "gpu":
        return [[] for _ in spec.roles]
    try:
        indices = [gpu.index for gpu in visible_gpus()]
    except NoGpu as error:
        raise SpecError(f"instances with GPUs cannot be started: {error}") from None
    if len(indices) < workers * len(spec.roles):
        raise SpecError(
            f"{len(spec.roles)} instances of {workers} workers need a GPU for each "
            f"worker, and {len(indices)} can be seen here: start fewer, or ask for "
            "less `tensor_parallel`"
        )
    return [
        indices[first : first + workers]
        for first in range(0, workers * len(spec.roles), workers)
    ]
