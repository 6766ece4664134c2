# SPDX-License-Identifier: Apache-2.0
"""What differs between the Mooncake connectors of releases, each difference once.

Read off the module itself: classes, signatures and fields. No version is asked for.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

# Fields of a decoder's message that have another name on the worker.
ATTRIBUTES = {
    "remote_hostname": "hostname",
    "remote_port": "rpc_port",
    "remote_tp_size": "tp_size",
    "remote_tp_rank": "tp_rank",
    "remote_pp_size": "pp_size",
    "block_lens": "block_len_per_layer",
    "kv_block_lens": "kv_block_len_per_layer",
    "registered_shared_group_ids": "region_shared_groups",
    "registered_row_offsets": "region_row_offsets",
}
# A worker's only region of memory, as register_kv_caches() would note it.
REGION = {
    "block_len": 16,
    "kv_caches_base_addr": [0],
    "block_len_per_layer": [16],
    "kv_block_len_per_layer": [16],
    "registered_layer_names": ["layers.0.attention"],
    "registered_layer_indices": [0],
    "registered_group_indices": [0],
    "region_shared_groups": [(0,)],
    "region_row_offsets": [-1],
}


def new_worker(module: ModuleType, vllm_config: Any, kv_cache_config: Any) -> Any:
    known = signature(module.MooncakeConnectorWorker).parameters
    more = [kv_cache_config] if "kv_cache_config" in known else []
    return module.MooncakeConnectorWorker(vllm_config, "engine", *more)


def give_a_region(worker: Any) -> None:
    for name, value in REGION.items():
        setattr(worker, name, value)


def block_ids(module: ModuleType, *ids: int) -> list:
    """Block ids as the connector has them: later releases have a list per group."""
    kind = module.SendBlockMeta.__annotations__["local_block_ids"]
    return [list(ids)] if str(kind) == "list[list[int]]" else list(ids)


def pull_of(module: ModuleType, worker: Any, req_blocks: dict, **other: Any) -> Any:
    """What a decoder with the memory of this worker asks of a prefiller."""
    known = module.MooncakeXferMetadata.__struct_fields__
    fields = {name: getattr(worker, ATTRIBUTES.get(name, name), None) for name in known}
    fields |= {"req_blocks": req_blocks} | other
    return module.MooncakeXferMetadata(**fields)


def report_method(module: ModuleType) -> str:
    """The worker's method that an engine step asks what has ended."""
    later = "get_transfer_results"
    found = hasattr(module.MooncakeConnectorWorker, later)
    return later if found else "get_finished"


def reports_failed_pulls(module: ModuleType) -> bool:
    """Whether a decoder tells the scheduler of requests that an answer calls failed."""
    # Upstream's form, and our patch's.
    names = ("_handle_failed_recv", "process_failed_pulls")
    return any(hasattr(module.MooncakeConnectorWorker, name) for name in names)
