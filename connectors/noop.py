# SPDX-License-Identifier: Apache-2.0
"""A KV connector that does nothing: what vLLM's connector framework costs by itself.

Every method that vLLM requires is here and returns at once; all else is the base
class's. Load it with `kv_connector: NoopConnector` and
`kv_connector_module_path: connectors.noop`.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class NoopMetadata(KVConnectorMetadata):
    pass


class NoopConnector(KVConnectorBase_V1, SupportsHMA):
    # Scheduler side.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        return NoopMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    # Worker side.

    def start_load_kv(self, forward_context, **kwargs) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
